"""Engine on transformers' `generate`, for models without a decode forward here and for comparison.

The sampling is ours: at every step the logits go through the sampler of the in-process engine, so the
tokens of a sample depend on its key as they do there, and log-probs mean the same. Everything
else is transformers': the loop, the cache, padding to the longest prompt, rows that wait for the last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core import keyed_random
from rft_engine.build_request import EngineBuildRequest
from rft_engine.completions import Completion, EngineStats
from rft_engine.decoding.token_sampler import TokenSampler
from rft_engine.decoding.trie_constraint import TrieSampler, check_constraint, check_whole
from rft_engine.engine_base import EngineBase
from rft_engine.protocols import WholeGenerator
from rft_engine.request_checks import check_budgets, check_keys, check_media, check_prompts
from rft_engine.typed_lists import to_floats, to_ints


class HfEngine(EngineBase):
    """Batches of rows through a `WholeGenerator` that shares the weights being trained.

    Not thread-safe, as the in-process engine. `max_rows` rows are generated at a time, in the order of their length.
    """

    def __init__(
        self, model: WholeGenerator, *, max_rows: int, max_len: int, device: torch.device | str = "cpu"
    ) -> None:
        """Make an engine around a model that generates whole rows.

        Args:
            model: what generates.
            max_rows: sequences generated at once.
            max_len: tokens of the longest prompt with its completion.
            device: where the model is.
        """
        self._model, self._max_rows = model, max_rows
        self._max_len = min(max_len, model.max_positions or max_len)
        self._device = torch.device(device)
        super().__init__()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt once for each of its keys: as `NativeEngine.generate` does."""
        self._states.require_ready("generate")
        options.check_vocabulary(self._model.vocab_size)
        check_keys(prompts, sample_keys)
        check_media(prompts, media)
        check_prompts(prompts, options.max_new_tokens, self._max_len, self._model.vocab_size)
        allowed = check_budgets(sample_keys, budgets, options.max_new_tokens)
        if constraint is not None:
            check_constraint(constraint, options, allowed, self._model.vocab_size)
        started = time.perf_counter()
        rows = [(prompt, key) for prompt, keys in zip(prompts, sample_keys, strict=True) for key in keys]
        images = [one for one, keys in zip(media or (), sample_keys, strict=False) for _ in keys]
        # rows of similar length share a batch, so that little of it is padding
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        completions_by_row: dict[int, Completion] = {}
        num_steps = 0
        for first in range(0, len(order), self._max_rows):
            chosen = order[first : first + self._max_rows]
            draws = self._draws(options, [rows[at][1] for at in chosen], [allowed[at] for at in chosen], constraint)
            longest = max(allowed[at] for at in chosen)
            seen = [[images[at] for at in chosen]] if images else []
            self._model.run([rows[at][0] for at in chosen], longest, draws.pick, draws.ended, *seen)
            completions_by_row |= dict(zip(chosen, draws.completions(self.weight_version), strict=True))
            num_steps += draws.num_steps
        in_order = [completions_by_row[index] for index in range(len(rows))]
        if constraint is not None:
            check_whole(constraint, in_order)
        self._stats = _stats(in_order, rows, num_steps, self._max_rows, time.perf_counter() - started)
        completions = iter(in_order)
        return [[next(completions) for _ in keys] for keys in sample_keys]

    def _draws(
        self, options: SamplingOptions, keys: Sequence[int], budgets: Sequence[int], constraint: TokenTrie | None
    ) -> _Draws:
        arguments = (options, keys, budgets, self._model.vocab_size, self._device)
        return _Draws(*arguments) if constraint is None else _ConstrainedDraws(*arguments, constraint)

    def load_weights(self, version: int) -> None:
        """Serve the model's present parameters as `version`; see `NativeEngine.load_weights`."""
        self._states.load_weights(version)

    def refresh(self) -> None:
        """Serve parameters that changed outside of a training step; nothing is derived from them here."""
        self._states.refresh()

    def sleep(self, level: int = 1) -> None:
        """Refuse to generate until `wake`; there is no memory to free, as no cache outlives a call."""
        self._states.sleep(level)

    def wake(self) -> None:
        """Be ready again. Does nothing when awake."""
        self._states.wake()

    def close(self) -> None:
        """Refuse everything from now on. Does nothing when closed."""
        self._states.close()


def build(request: EngineBuildRequest) -> HfEngine:
    """Make the engine around transformers' `generate` of the policy in this process."""
    assert request.model is not None, "this engine needs the policy in its process"
    rows, generator = request.settings.engine_max_rows, request.model.generator()
    return HfEngine(generator, max_rows=rows, max_len=request.max_len, device=request.device)


class _Draws:
    """Sampling of one batch of rows, one token of every row a call."""

    def __init__(
        self,
        options: SamplingOptions,
        keys: Sequence[int],
        budgets: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._options, self._device = options, device
        self._sampler = TokenSampler(options, vocab_size, device)
        self._first_sampler = TokenSampler(options.for_first_token, vocab_size, device)
        self._uniforms_BM = keyed_random.uniforms(keys, options.max_new_tokens).to(device)
        self._budgets_B = torch.tensor(list(budgets), device=device)
        self._ended_B = torch.zeros(len(keys), dtype=torch.bool, device=device)
        self._drawn: list[tuple[Tensor, ...]] = []

    @property
    def num_steps(self) -> int:
        """Tokens that were drawn for every row."""
        return len(self._drawn)

    def pick(self, logits_BV: Tensor, step: int) -> Tensor:
        """Draw token number `step` of every row; returns [B] token ids."""
        assert step == len(self._drawn), f"token {step} asked for, {len(self._drawn)} were drawn"
        drawn = self._draw(logits_BV, self._uniforms_BM[:, step], step)
        self._drawn.append(drawn)
        # a row that has ended is drawn on with the others; `completions` cuts off what comes after its end
        self._ended_B |= self._is_last(drawn) | (self._budgets_B <= step + 1)
        return drawn[0]

    def ended(self) -> Tensor:
        """[B] bool: rows that need no more tokens."""
        return self._ended_B

    def _draw(self, logits_BV: Tensor, uniforms_B: Tensor, step: int) -> tuple[Tensor, ...]:
        sampler = self._sampler if step else self._first_sampler
        waits = step < self._options.min_new_tokens and self._sampler.has_stop_tokens
        may_stop_B = torch.zeros(logits_BV.shape[0], dtype=torch.bool, device=self._device) if waits else None
        return sampler.draw(logits_BV, uniforms_B, may_stop_B)

    def _is_last(self, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return a bool tensor in the shape of the tokens: True where the row stops with the token."""
        return self._sampler.is_stop_V[drawn[0]]

    def completions(self, weight_version: int) -> list[Completion]:
        """Return the rows as records; tokens drawn after an end or beyond a budget are left out."""
        together = tuple(torch.stack(parts, dim=1) for parts in zip(*self._drawn, strict=True))
        is_last_BN = self._is_last(together)
        # a row without a stop gets a length above every budget, so that one comparison tells "stop" from "length"
        lengths_B = torch.where(is_last_BN.any(1), is_last_BN.int().argmax(1) + 1, self._options.max_new_tokens + 1)
        stopped_B, lengths_B = lengths_B <= self._budgets_B, lengths_B.minimum(self._budgets_B)
        tokens_BN, logprobs_BN, mass_BN = (column.cpu() for column in together[:3])
        return [
            Completion(
                token_ids=tuple(to_ints(tokens_BN[row, :length])),
                logprobs=tuple(to_floats(logprobs_BN[row, :length])),
                log_kept_mass=tuple(to_floats(mass_BN[row, :length])),
                finish_reason="stop" if stopped else "length",
                weight_version=weight_version,
            )
            for row, (length, stopped) in enumerate(zip(to_ints(lengths_B), to_ints(stopped_B), strict=True))
        ]


class _ConstrainedDraws(_Draws):
    """Sampling within a tree of sequences: a row ends with its sequence."""

    def __init__(
        self,
        options: SamplingOptions,
        keys: Sequence[int],
        budgets: Sequence[int],
        vocab_size: int,
        device: torch.device,
        trie: TokenTrie,
    ) -> None:
        super().__init__(options, keys, budgets, vocab_size, device)
        trie = trie.to(device)
        self._walk, self._first_walk = TrieSampler(options, trie), TrieSampler(options.for_first_token, trie)
        self._states_B = TrieSampler.start(len(keys), device)

    def _draw(self, logits_BV: Tensor, uniforms_B: Tensor, step: int) -> tuple[Tensor, ...]:
        drawn = (self._walk if step else self._first_walk).draw(logits_BV, uniforms_B, self._states_B)
        self._states_B = drawn[3]
        return drawn

    def _is_last(self, drawn: tuple[Tensor, ...]) -> Tensor:
        return self._walk.ends_S[drawn[3]]


def _stats(
    completions: Sequence[Completion],
    rows: Sequence[tuple[Sequence[int], int]],
    num_steps: int,
    num_slots: int,
    seconds: float,
) -> EngineStats:
    lengths = [len(completion.token_ids) for completion in completions]
    if not lengths:
        return EngineStats()
    return EngineStats(
        num_generated_tokens=sum(lengths),
        num_prefill_tokens=sum(len(prompt) for prompt, _ in rows),  # once a sample
        num_decode_steps=num_steps,
        mean_occupancy=sum(lengths) / (num_steps * min(num_slots, len(rows))),
        tail_ratio=max(lengths) / statistics.median(lengths),
        seconds=seconds,
        rows=min(num_slots, len(rows)),
        rows_asked=min(num_slots, len(rows)),
    )
