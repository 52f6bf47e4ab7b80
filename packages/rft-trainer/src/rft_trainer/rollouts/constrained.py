"""An engine that draws every completion among the sequences of a tree."""

from __future__ import annotations

from collections.abc import Sequence

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_trainer.protocols import RefreshableEngine, SampledCompletion


class ConstrainedEngine:
    """An engine whose completions are sequences of a tree, whoever asks for them; all else is the engine's own."""

    def __init__(self, engine: RefreshableEngine, trie: TokenTrie) -> None:
        self._engine, self._trie = engine, trie

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

    def load_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version."""
        self._engine.load_weights(version)

    def refresh(self) -> None:
        """Serve the policy's present weights under the present version."""
        self._engine.refresh()

    def sleep(self, level: int = 1) -> None:
        """Release the engine's memory until `wake` is called."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Restore the memory of a sleeping engine."""
        self._engine.wake()
