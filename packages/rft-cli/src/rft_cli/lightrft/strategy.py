"""LightRFT's `strategy`: its calls of the inference engine, on the one engine of a run of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rft.build.engines import choose_engine
from rft.build.rl_data import response_limits
from rft.build.shared_parts import SamplingOptions, sampling_options
from rft.settings import RlSettings
from rft.stages.rl import PreparedRun
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_core.nearest_names import nearest_names
from rft_trainer.protocols import RefreshableEngine

Prompts = Sequence[str] | Sequence[Sequence[int]]

SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens")
"""Keys of `sampling_params`; absent ones are as in the run's settings (`n` and `min_tokens`: 1 and 0)."""

MEDIA = ("all_images", "images_num", "all_videos", "videos_num")


@dataclass(frozen=True, slots=True)
class Generation:
    """One response of `gather_and_generate`."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    text: str
    """The response without special tokens."""
    logprobs: tuple[float, ...]
    """Log-probability of each token of the response, in nats, at the temperature it was drawn with."""
    finish_reason: str
    """"stop" or "length"."""


class Strategy:
    """The engine of a run, under LightRFT's names."""

    def __init__(self, ready: PreparedRun, settings: RlSettings) -> None:
        self._ready = ready
        self._settings = settings
        self._num_calls = 0

    def update_engine_weights(self, actor: object) -> None:
        """Let the engine sample from the actor's weights as they are now.

        A training step does this by itself; it is for weights that were changed outside of one.

        Raises:
            OptionsError: the actor is not that of this trainer, whose weights the engine has or shares.
            ServiceError: an engine with its own copy does not serve them afterwards.
        """
        policy: Any = self._ready.training.updater.model
        if actor is not policy and actor is not policy.model:
            raise OptionsError(
                code="lightrft.other_actor",
                what=f"update_engine_weights was given a {type(actor).__name__} that is not the trainer's actor",
                where="strategy.update_engine_weights",
                why="the engine samples from the weights that are being trained; it holds no others",
                state="the engine is unchanged",
                do="strategy.update_engine_weights(trainer.actor)",
            )
        self._engine.refresh()
        check = self._ready.training.check_engine
        if check is not None:
            # the check draws samples, for which the engine has to be awake
            self._engine.wake()
            check(self._ready.training.progress.step)

    def gather_and_generate(
        self,
        prompts: Prompts | None = None,
        *,
        sampling_params: Mapping[str, float] | None = None,
        all_prompts: Sequence[str] | None = None,
        all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
        sleep_engine: bool = True,
        **media: object,
    ) -> list[Generation]:
        """Responses to prompts, in order, `n` for each; every rank answers its own.

        The engine is woken for it, and with `sleep_engine` gives its memory back afterwards; both may be asked for
        again and again. A later call draws other responses; the same script draws the same ones.

        Args:
            prompts: texts as they are (no template is put around them), or token ids; `all_prompts` and
                `all_prompt_token_ids` are LightRFT's names of the two.
            sampling_params: see `SAMPLING`; temperature 0 is greedy.
            all_prompts: texts.
            all_prompt_token_ids: token ids.
            sleep_engine: whether the engine sleeps afterwards, if it is one that can (vLLM on a CPU cannot); a
                training step wakes it.
            media: images and videos of LightRFT, which have to be None.

        Raises:
            OptionsError: no prompts or two kinds, a parameter that is not there, a prompt that is too long, media.
        """
        _refuse_media(media)
        token_ids = self._token_ids(
            [lists for lists in (prompts, all_prompts, all_prompt_token_ids) if lists is not None]
        )
        asked = dict(sampling_params or {})
        options, number = self._options(asked), int(asked.get("n", 1))
        self._refuse_long(token_ids, options.max_new_tokens)
        keys = [[self._key(i, j) for j in range(number)] for i in range(len(token_ids))]
        # part of the keys: the next call draws other responses
        self._num_calls += 1
        self._engine.wake()
        completions = self._engine.generate(token_ids, keys, options)
        if sleep_engine and choose_engine(self._settings.engine, self._ready.machine.device).can_sleep:
            self._engine.sleep(1)
        flat = [(ids, one) for ids, group in zip(token_ids, completions, strict=True) for one in group]
        texts = self._ready.tokenizer.decode_batch([one.token_ids for _, one in flat])
        return [
            Generation(tuple(ids), tuple(one.token_ids), text, tuple(one.logprobs), one.finish_reason)
            for (ids, one), text in zip(flat, texts, strict=True)
        ]

    @property
    def _limits(self) -> tuple[int, int]:
        """Tokens of the longest response, and of the longest sequence that the engine holds."""
        return response_limits(self._settings, self._ready.data.longest_prompt)

    @property
    def _engine(self) -> RefreshableEngine:
        return cast("RefreshableEngine", self._ready.training.rollouts)

    def _key(self, prompt: int, sample: int) -> int:
        rank = self._ready.machine.ranks.rank
        # each rank answers prompts of its own, so equal numbers must not draw equal responses
        return derive_key(self._settings.run.seed, "gather_and_generate", rank, self._num_calls, prompt, sample)

    def _token_ids(self, prompt_lists: Sequence[Prompts]) -> list[list[int]]:
        if len(prompt_lists) != 1:
            raise OptionsError(
                code="lightrft.prompts",
                what=f"gather_and_generate was given {len(prompt_lists)} lists of prompts",
                where="strategy.gather_and_generate",
                why="it answers one list: texts or token ids",
                state="nothing was generated",
                do='gather_and_generate(["1+1="])',
            )
        # text for a chat template brings its special tokens
        tokenizer, special = self._ready.tokenizer, not self._settings.data.apply_chat_template
        return [
            tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else list(prompt)
            for prompt in prompt_lists[0]
        ]

    def _refuse_long(self, token_ids: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        _, room = self._limits
        # of equally long prompts the first is named
        length, index = max(((len(ids), -index) for index, ids in enumerate(token_ids)), default=(0, 0))
        if length + max_new_tokens <= room:
            return
        shorter = f'sampling_params={{"max_tokens": {room - length}}}'
        raise OptionsError(
            code="lightrft.prompt_too_long",
            what=f"prompt {-index}: {length} tokens + a response of {max_new_tokens} = {length + max_new_tokens}, "
            f"the engine holds {room}",
            where="strategy.gather_and_generate",
            why="the engine is made for the run's longest prompt and its longest response",
            state="nothing was generated",
            do=shorter if length < room else f"a prompt of at most {room - 1} tokens",
        )

    def _options(self, asked: dict[str, float]) -> SamplingOptions:
        unknown = [name for name in asked if name not in SAMPLING]
        if unknown:
            near = nearest_names(unknown[0], SAMPLING) or list(SAMPLING)
            raise OptionsError(
                code="lightrft.sampling_params",
                what=f"sampling_params has {unknown[0]!r}; it may hold {', '.join(SAMPLING)}",
                where="strategy.gather_and_generate",
                why="a parameter has an effect or is refused",
                state="nothing was generated",
                do=f'sampling_params={{"{near[0]}": {asked[unknown[0]]}}}',
            )
        drawn = self._settings.sampling
        longest, _ = self._limits
        return replace(
            sampling_options(drawn, int(asked.get("max_tokens", longest)), self._ready.tokenizer.eos_ids),
            temperature=asked.get("temperature", drawn.temperature),
            top_p=asked.get("top_p", drawn.top_p),
            top_k=max(int(asked.get("top_k", drawn.top_k)), 0),
            min_p=asked.get("min_p", drawn.min_p),
            min_new_tokens=int(asked.get("min_tokens", 0)),
        )


def _refuse_media(media: Mapping[str, object]) -> None:
    asked = [name for name, value in media.items() if value is not None or name not in MEDIA]
    if not asked:
        return
    known = asked[0] in MEDIA
    raise OptionsError(
        code="lightrft.media" if known else "lightrft.argument",
        what=f"gather_and_generate was given {asked[0]}",
        where="strategy.gather_and_generate",
        why="prompts are texts or token ids in this version" if known else "it has no such argument",
        state="nothing was generated",
        do=f"leave {asked[0]} out",
    )
