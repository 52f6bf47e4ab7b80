"""What plain counting reaches on synthetic people, and what the one reaches who knows them: the room for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rft_genrec.catalogue.records import Sample
from rft_genrec.interactions.synthetic import Population

Scores = Callable[[Sample], NDArray[np.float64]]
"""Sample -> [N] a score of every item, the higher the better."""
TOP = 10


@dataclass(frozen=True, slots=True)
class RankingResult:
    """Hit rate and NDCG among the ten best of every sample."""

    name: str
    hit_rate: float
    ndcg: float
    num_samples: int


def measure(name: str, score: Scores, samples: Sequence[Sample]) -> RankingResult:
    """Rank all items for each sample; of items with equal scores, the one with the smaller number is first."""
    hits, gain = 0, 0.0
    for sample in samples:
        scores_N = score(sample)
        own = scores_N[sample.target]
        rank = int((scores_N > own).sum() + (scores_N[: sample.target] == own).sum())
        if rank < TOP:
            hits += 1
            gain += 1 / float(np.log2(rank + 2))
    num = max(1, len(samples))
    return RankingResult(name, hits / num, gain / num, len(samples))


def popularity(train: Iterable[Sample], num_items: int) -> Scores:
    """Score items by how often they are targets of the training samples."""
    counts_N = _counts(train, num_items)
    return lambda sample: counts_N


def first_order(train: Sequence[Sample], num_items: int) -> Scores:
    """Score items by how often they came right after the last item, popularity breaking ties."""
    small_N = _counts(train, num_items) / (1.0 + len(train))
    follows: dict[int, NDArray[np.float64]] = {}
    for sample in train:
        follows.setdefault(sample.history[-1], small_N.copy())[sample.target] += 1
    return lambda sample: follows.get(sample.history[-1], small_N)


def oracle(population: Population) -> Scores:
    """Score items by their true chances, persona and brand of the person known."""

    def score(sample: Sample) -> NDArray[np.float64]:
        user = int(sample.user[1:])
        persona, brand = int(population.personas_U[user]), int(population.brands_U[user])
        return population.world.probabilities(sample.history, persona, brand)

    return score


def headroom(population: Population, train: Sequence[Sample], test: Sequence[Sample]) -> list[RankingResult]:
    """Return what popularity, first-order transitions and the oracle reach on the test samples."""
    num_items = len(population.world.item_subs_N)
    return [
        measure("popularity", popularity(train, num_items), test),
        measure("first-order Markov", first_order(train, num_items), test),
        measure("oracle (persona and brand known)", oracle(population), test),
    ]


def _counts(train: Iterable[Sample], num_items: int) -> NDArray[np.float64]:
    targets = np.fromiter((sample.target for sample in train), dtype=np.int64)
    return np.bincount(targets, minlength=num_items).astype(np.float64)
