"""The policy that is trained, as a loop calls it: sampled by its engine, scored by its own forward.

Completions come from the built-in loop's collector and log-probs from its scorer, so that a loop of one's own has
the same numbers on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, ServiceError
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.data.prompts import Message, PromptRow
from rft_trainer.data.rendering import PromptRenderer
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Collectives, Engine
from rft_trainer.records.rollouts import Prompt, TrainingSample
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.sampled_groups import SampledGroups
from rft_trainer.scoring.logprobs import LogprobScorer

Messages = Sequence[Mapping[str, Any]]
GivenPrompt = str | Prompt | Sequence[int] | Messages
"""A text, a prompt with its token ids, token ids alone, or the messages of a conversation."""


class ResponseTokenizer(Protocol):
    """The tokenizer of the policy."""

    @property
    def eos_ids(self) -> Sequence[int]: ...
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...
    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSource:
    """Source of the samples: the engine, how it draws, and how much it holds."""

    engine: Callable[[], Engine]
    """Returns the engine; it is made at the first call, so that loops that sample nothing need none."""
    options: SamplingOptions
    """Where a call of `sample` names no others."""
    room: int
    """Tokens of a prompt with its completion."""
    seed: int
    sleeps: bool
    """Whether the engine gives its memory back after every call."""
    stale: Callable[[], bool]
    """Whether the weights have changed since the engine got them."""


class TrainedPolicy:
    """The policy of a loop; every rank calls its methods with the same arguments and has the same results."""

    def __init__(
        self,
        model: Any,
        renderer: PromptRenderer,
        tokenizer: ResponseTokenizer,
        collectives: Collectives,
        *,
        source: SamplingSource,
        scorer: Callable[[float], LogprobScorer],
        reference: Callable[[float], LogprobScorer] | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        """Store the collaborators.

        Args:
            model: the policy's model, for reading.
            renderer: turns texts and messages into token ids.
            tokenizer: encodes and decodes responses.
            collectives: all ranks.
            source: of the completions.
            scorer: makes the scorer under the policy at a temperature.
            reference: makes the scorer under the reference policy; None = there is none.
            timer: charged with the seconds of sampling.
        """
        self._model = model
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._collectives = collectives
        self._source = source
        self._scorer = scorer
        self._reference = reference
        self._timer = timer or PhaseTimer()
        self._num_sampled = 0

    @property
    def model(self) -> Any:
        """The model that is trained, as the trainer holds it: its parts of the weights where they are sharded."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: `encode`, `decode`, `eos_ids`."""
        return self._tokenizer

    @property
    def num_sampled(self) -> int:
        """Prompts sampled so far: the next one has this number, from which its random keys are made."""
        return self._num_sampled

    @num_sampled.setter
    def num_sampled(self, number: int) -> None:
        self._num_sampled = number

    def sample(
        self,
        prompts: Sequence[GivenPrompt],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
    ) -> SampledGroups:
        """Sample `n` completions of every prompt with the published weights.

        Ranks share the prompts out, and all of them get all completions. A completion depends on the seed, the number
        of its prompt since the loop was opened and its index in the group: not on the number of ranks.

        Args:
            prompts: texts, messages (with `apply_chat_template`), token ids, or `Prompt`.
            n: completions a prompt.
            max_tokens: of a completion; None = `generate_max_len`, or less where the model has no room for that.
            temperature: 0 = greedy; None = as the loop was opened, and so for `top_p`, `top_k` and `min_p`.
            top_p: as of the setting.
            top_k: as of the setting; 0 = all.
            min_p: as of the setting.

        Raises:
            OptionsError: no prompt, one text in place of a list, a prompt without a token or too long, an option out
                of its range.
            ServiceError: the weights have changed since they were published.
        """
        if isinstance(prompts, str):
            # its letters would be prompts
            raise _one_text(prompts)
        if not prompts or n < 1:
            raise _nothing_to_sample(len(prompts), n)
        if self._source.stale():
            raise _not_published()
        given = [self._prompt(prompt, self._num_sampled + index) for index, prompt in enumerate(prompts)]
        longest = max(len(prompt.token_ids) for prompt in given)
        changes = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        limit = min(self._source.options.max_new_tokens, max(self._source.room - longest, 1))
        options = replace(
            self._source.options,
            max_new_tokens=limit if max_tokens is None else max_tokens,
            **{name: value for name, value in changes.items() if value is not None},
        )
        entries = [LedgerEntry(0, self._num_sampled + index, index) for index in range(len(given))]
        engine = self._source.engine()
        collector = RolloutCollector(
            engine,
            self._tokenizer,
            _unscored,
            self._collectives,
            sampling=options,
            group_size=n,
            seed=self._source.seed,
        )
        engine.wake()
        groups = collector.collect(entries, given, self._timer)
        if self._source.sleeps:
            engine.sleep(1)
        # part of the keys: the next call draws other completions
        self._num_sampled += len(given)
        return SampledGroups(tuple(groups), options.temperature)

    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """[T] log-probs of the batch's tokens under the policy, in nats, without gradient.

        Over all tokens of the batch, end to end in the order of its samples; 0 where they are not in the loss (the
        prompts). `backward()` of them fails: for a gradient give a loss to `trainer.forward_backward`, which calls it
        with log-probs that have one.
        """
        return _end_to_end(batch, self._scorer(self._temperature(batch)).of_samples(batch.samples))

    def entropies(self, batch: TrainingBatch) -> Tensor:
        """[T] entropies of the distributions that predict the batch's tokens, in nats, as `logprobs`."""
        return _end_to_end(batch, self._scorer(self._temperature(batch)).entropies_of_samples(batch.samples))

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        """[T] log-probs under the reference policy, the weights that the loop began with, as `logprobs`.

        Raises:
            OptionsError: the loop was opened without a reference.
        """
        if self._reference is None:
            raise _no_reference()
        return _end_to_end(batch, self._reference(self._temperature(batch)).of_samples(batch.samples))

    def demonstrations(self, rows: Sequence[tuple[GivenPrompt, str]]) -> TrainingBatch:
        """Return (prompt, response) pairs as a batch; an end token follows every response.

        Raises:
            OptionsError: no row; a row that is no such pair.
        """
        if not rows:
            raise _no_rows("demonstrations")
        _check_rows(rows, "demonstrations", ("prompt", "response"))
        samples = [self._demonstration(prompt, text, f"row:{i}") for i, (prompt, text) in enumerate(rows)]
        return TrainingBatch.of(samples, temperature=1.0)

    def pairs(self, rows: Sequence[tuple[GivenPrompt, str, str]]) -> TrainingBatch:
        """Return (prompt, chosen, rejected) rows as a batch of pairs, which no cut divides; chosen comes first.

        Raises:
            OptionsError: no row; a row that is no such triple.
        """
        if not rows:
            raise _no_rows("pairs")
        _check_rows(rows, "pairs", ("prompt", "chosen", "rejected"))
        samples: list[TrainingSample] = []
        for index, (prompt, chosen, rejected) in enumerate(rows):
            for name, text in (("chosen", chosen), ("rejected", rejected)):
                sample = self._demonstration(prompt, text, f"pair:{index}:{name}")
                samples.append(replace(sample, unit=f"pair:{index}"))
        return TrainingBatch.of(samples, temperature=1.0)

    def _temperature(self, batch: TrainingBatch) -> float:
        return self._source.options.temperature if batch.temperature is None else batch.temperature

    def _demonstration(self, given: GivenPrompt, text: str, name: str) -> TrainingSample:
        prompt = self._prompt(given, 0)
        # encoded apart, so that the prompt has the tokens that it has when responses are sampled; sampling stops at
        # any of the end tokens, and one of them is enough to learn
        tokens = (*prompt.token_ids, *self._tokenizer.encode(text), *self._tokenizer.eos_ids[:1])
        return TrainingSample(name, tokens, len(prompt.token_ids), 0.0, media=prompt.media)

    def _prompt(self, given: GivenPrompt, number: int) -> Prompt:
        if isinstance(given, Prompt):
            return given
        name = f"prompt:{number}"
        if isinstance(given, str):
            row = PromptRow(name, given, None, None, None, "prompt", number)
        elif given and all(isinstance(part, Mapping) for part in given):
            messages: Any = given
            row = PromptRow(name, None, tuple(map(_message, messages)), None, None, "prompt", number)
        else:
            ids: Any = given
            return Prompt(name, tuple(int(one) for one in ids), self._tokenizer.decode_batch([ids])[0], None, "prompt")
        rendered = self._renderer.render(row)
        return Prompt(name, rendered.token_ids, rendered.text, None, "prompt", None, rendered.messages)


def _message(given: Mapping[str, Any]) -> Message:
    role, content = given.get("role"), given.get("content")
    if isinstance(role, str) and isinstance(content, str):
        return Message(role, content)
    raise OptionsError(
        code="policy.message",
        what=f"a message has role {role!r} and content {type(content).__name__}",
        where="the prompts of a policy",
        why="a message is a role and a text",
        state="nothing was sampled",
        do='[{"role": "user", "content": "1+1="}]',
    )


_PROMPTS_FIRST = (["input"], ["prompt"], ["question"])
"""Keys that, where a dict begins with one, tell the prompt from the response."""


def _unscored(items: Sequence[RewardItem]) -> list[Score]:
    """Give no reward: the loop computes its own."""
    return [Score(None, RewardStatus.UNSCORED) for _ in items]


def _end_to_end(batch: TrainingBatch, rows: Sequence[Sequence[float]]) -> Tensor:
    """Return [T] float32: the rows at the responses, zeros at the prompts."""
    parts = [
        torch.tensor([*[0.0] * sample.prompt_length, *row], dtype=torch.float32)
        for sample, row in zip(batch.samples, rows, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def _nothing_to_sample(num_prompts: int, n: int) -> OptionsError:
    return OptionsError(
        code="policy.nothing_to_sample",
        what=f"sample of {num_prompts} prompts, n = {n}",
        where="policy.sample",
        why="a call samples at least one completion of at least one prompt",
        state="nothing was sampled",
        do="policy.sample(prompts, n=4)",
    )


def _one_text(text: str) -> OptionsError:
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    return OptionsError(
        code="policy.one_text",
        what=f"prompts is the text {shown!r}",
        where="policy.sample",
        why="prompts are a list; every letter of a text would be a prompt",
        state="nothing was sampled",
        do=f"policy.sample([{shown!r}])" if shown == text else "policy.sample([prompt])",
    )


def _check_rows(rows: Sequence[object], name: str, parts: Sequence[str]) -> None:
    """Refuse rows that are not tuples of these parts: a dict of two keys would be trained on its keys.

    Raises:
        OptionsError: the first such row.
    """
    for index, row in enumerate(rows):
        keys = [str(key) for key in cast("Mapping[object, object]", row)] if isinstance(row, Mapping) else []
        size = len(cast("Sequence[object]", row)) if isinstance(row, tuple | list) else 0
        if size == len(parts):
            continue
        names = list(parts) if set(parts) <= set(keys) else keys if keys[:1] in _PROMPTS_FIRST else []
        taken = ", ".join(f"row[{key!r}]" for key in names)
        has_all = len(names) == len(parts)
        raise OptionsError(
            code="policy.row",
            what=f"row {index} is a {type(row).__name__}" + (f" of {', '.join(keys)}" if keys else f" of {size} parts"),
            where=f"policy.{name}",
            why=f"a row is a tuple ({', '.join(parts)})",
            state="no weight was changed",
            do=f"policy.{name}([({taken}) for row in rows])" if has_all else f"policy.{name}([({', '.join(parts)})])",
        )


def _not_published() -> ServiceError:
    return ServiceError(
        code="policy.not_published",
        what="the weights have changed since the engine got them",
        where="policy.sample",
        why="completions of other weights would be trained as if the present policy had sampled them",
        state="nothing was sampled",
        do="trainer.publish()",
    )


def _no_reference() -> OptionsError:
    return OptionsError(
        code="policy.no_reference",
        what="the loop was opened without a reference policy",
        where="policy.reference_logprobs",
        why="it is a second copy of the weights, which is loaded where it is asked for",
        state="nothing was computed",
        do="rft.open_loop(pretrain, reference=True)",
    )


def _no_rows(name: str) -> OptionsError:
    return OptionsError(
        code="policy.no_rows",
        what=f"policy.{name} was given no row",
        where=f"policy.{name}",
        why="a batch has at least one sample",
        state="no weight was changed",
        do=f"policy.{name}(rows) with at least one row",
    )
