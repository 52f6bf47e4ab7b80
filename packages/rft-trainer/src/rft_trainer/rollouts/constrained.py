"""Engines whose completions are sequences of a tree: drawn, or searched for; and their log-probs within the tree.

`rft_trainer.scoring.constrained_policy` is the other side: the policy's log-probs of such completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rft_algos.decoding.beam_search import Mass
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_trainer.protocols import RefreshableEngine, SampledCompletion


class SearchingEngine(RefreshableEngine, Protocol):
    """An engine with a beam search."""

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        trie: TokenTrie,
        *,
        num_beams: int,
        temperature: float = 1.0,
        mass: Mass = "vocabulary",
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Return the best sequences of the tree after every prompt, best first."""
        ...


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


class BeamEngine(ConstrainedEngine):
    """A constrained engine whose completions are the best sequences of its tree: as many as there are keys, best first.

    Fewer where the tree has fewer. Nothing is drawn, so that keys, top-p and the like have no effect; beams are ranked
    by their probability among the sequences, at the temperature of the call (at 1 where that is 0).
    """

    def __init__(self, engine: SearchingEngine, trie: TokenTrie) -> None:
        super().__init__(engine, trie)
        self._search = engine

    @property
    def most_beams(self) -> int:
        """Return the number of sequences that there are."""
        return self._trie.num_sequences

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
        """Return the best sequences after each prompt, one a key.

        Raises:
            OptionsError: prompts with images.
        """
        del budgets  # a completion is a whole sequence, whose length `constraint_of` has checked
        if any(one is not None for one in media or ()):
            raise OptionsError(
                code="constraint.beams_with_images",
                what="a beam search after prompts with images",
                where="--num_beams",
                why="the search reads prompts as token ids alone",
                do="--num_beams 0, which draws samples within the constraint",
            )
        trie = self._trie if constraint is None else constraint
        # one search for all prompts that ask for as many: a wider one finds the same first beams only if it is exact
        found: dict[int, Sequence[SampledCompletion]] = {}
        for width in sorted({len(keys) for keys in sample_keys}):
            places = [place for place, keys in enumerate(sample_keys) if len(keys) == width]
            beams = self._search.beam_search(
                [prompts[place] for place in places],
                trie,
                num_beams=width,
                temperature=options.temperature or 1.0,
                mass="allowed",
            )
            found |= dict(zip(places, beams, strict=True))
        return [found[place] for place in range(len(prompts))]


@dataclass(frozen=True, slots=True)
class _WithinTree:
    """A completion whose log-probs are those within its tree."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    log_kept_mass: Sequence[float]
    finish_reason: str
    weight_version: int


class RenormalisedEngine:
    """A constrained engine whose log-probs are those among the tokens that may follow: what training compares with.

    The engine reports log p(token) over the vocabulary and the log of the mass that it drew from; where nothing else
    cuts tokens off, their difference is log p(token | tokens that may follow).
    """

    def __init__(self, engine: ConstrainedEngine) -> None:
        self._engine = engine

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
        """Sample completions, as `ConstrainedEngine.generate`; their kept mass is 1, of what may follow."""
        drawn = self._engine.generate(
            prompts, sample_keys, options, budgets=budgets, constraint=constraint, media=media
        )
        return [[_renormalised(one) for one in completions] for completions in drawn]

    def load_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version."""
        self._engine.load_weights(version)

    def sleep(self, level: int = 1) -> None:
        """Release the engine's memory until `wake` is called."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Restore the memory of a sleeping engine."""
        self._engine.wake()


def _renormalised(drawn: SampledCompletion) -> SampledCompletion:
    logprobs, log_kept_mass = within_tree(drawn.logprobs, drawn.log_kept_mass)
    return _WithinTree(drawn.token_ids, logprobs, log_kept_mass, drawn.finish_reason, drawn.weight_version)


def within_tree(
    logprobs: Sequence[float], log_kept_mass: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the log-prob of each token among those that it was drawn from, and the log of all of their mass: 0."""
    pairs = zip(logprobs, log_kept_mass, strict=True)
    # a token without an alternative is certain; rounding may put its share a little above 1
    within = tuple(min(logprob - mass, 0.0) for logprob, mass in pairs)
    return within, (0.0,) * len(within)
