"""An engine beside the trainer that draws every sample within a tree of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_trainer.async_rollouts.protocols import AsyncEngine, DrawnTokens
from rft_trainer.protocols import SampledCompletion
from rft_trainer.rollouts.constrained import within_tree


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was drawn of a sample."""

    request: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    log_kept_mass: Sequence[float]
    finish_reason: str
    weight_version: int


class ConstrainedAsyncEngine:
    """An `AsyncEngine` whose samples are sequences of a tree; all else is the engine's own.

    A sample that is interrupted gives no tokens and is drawn again from its first one, under the weights that are
    served then: a place within the tree is not kept, and sequences of a tree are short.
    """

    def __init__(self, engine: AsyncEngine, trie: TokenTrie, *, renormalised: bool) -> None:
        """Store the engine; `renormalised` samples have their log-probs among the tokens that may follow."""
        self._engine: Any = engine
        self._trie, self._renormalised = trie, renormalised

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Sample completions, as `Engine.generate`, within the tree unless the call has one of its own."""
        trie = self._trie if constraint is None else constraint
        return self._engine.generate(prompts, sample_keys, options, budgets=budgets, constraint=trie, media=media)

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        options: SamplingOptions,
        *,
        media: Sequence[object | None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[DrawnTokens]:
        """Yield results as samples end, as `AsyncEngine.draw`; an interrupted one has no tokens."""
        drawn = self._engine.draw(
            prefixes, keys, starts, budgets, options, media=media, stop=stop, constraint=self._trie
        )
        for one in drawn:
            if one.finish_reason == "interrupted":
                yield _Drawn(one.request, (), (), (), one.finish_reason, one.weight_version)
                continue
            logprobs, log_kept_mass = one.logprobs, one.log_kept_mass
            if self._renormalised:
                logprobs, log_kept_mass = within_tree(logprobs, log_kept_mass)
            yield _Drawn(one.request, one.token_ids, logprobs, log_kept_mass, one.finish_reason, one.weight_version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
