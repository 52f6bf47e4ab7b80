"""A model and a counter together: log p + weight * log counter, with the weight chosen on held-out samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rft_algos.evaluation.ranking import ndcg_at_k
from rft_algos.statistics import Interval
from rft_genrec.baselines.recommender import ItemScorer
from rft_genrec.catalogue.records import Sample
from rft_genrec.evaluation.measures import Measured, difference
from rft_genrec.evaluation.rankings import Ranking

WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Weights that are tried."""
DECIDED_BY = ("HR@10", "NDCG@10")
"""Measures by which a mixture is compared with its parts, where the beams are as many."""


@dataclass(frozen=True, slots=True)
class MixtureVerdict:
    """A mixture beside its parts."""

    weight: float
    over: Mapping[str, Mapping[str, Interval]]
    """Part -> measure -> paired interval of the mixture's gain over it."""

    @property
    def counts(self) -> bool:
        """True where every gain over both parts has an interval above 0."""
        return all(one.low > 0 for gains in self.over.values() for one in gains.values())


def mixed(rankings: Sequence[Ranking], samples: Sequence[Sample], counter: ItemScorer, weight: float) -> list[Ranking]:
    """Rank items by log p of their beam + weight * log counter.

    Candidates are the items of the beams and as many of the counter's best. What no beam has found has at most the
    score of the last beam, and is given that.
    """
    found: list[Ranking] = []
    for start in range(0, len(rankings), 256):
        part = rankings[start : start + 256]
        scores_HN = counter.scores([sample.history for sample in samples[start : start + 256]])
        found += [_mixed(one, row, weight) for one, row in zip(part, scores_HN, strict=True)]
    return found


def _mixed(ranking: Ranking, counted_N: np.ndarray, weight: float) -> Ranking:
    num = len(ranking.places)
    beams = {item: score for place, score in zip(ranking.places, ranking.scores, strict=True) for item in place}
    least = ranking.scores[-1]
    if weight:
        for item in np.argpartition(-counted_N, min(num, len(counted_N) - 1))[:num].tolist():
            beams.setdefault(item, least)
    scores = {item: score + weight * math.log(counted_N[item]) for item, score in beams.items()}
    # of equal scores the one that the counter prefers, then the lower number
    order = sorted(scores, key=lambda item: (-scores[item], -counted_N[item], item))[:num]
    return Ranking(ranking.sample_id, tuple((item,) for item in order), tuple(scores[item] for item in order))


def chosen_weight(
    rankings: Sequence[Ranking],
    samples: Sequence[Sample],
    counter: ItemScorer,
    weights: Sequence[float] = WEIGHTS,
) -> float:
    """Return the weight with the best NDCG@10 on held-out samples; of equal ones the smaller."""

    def gain(weight: float) -> float:
        ranked = mixed(rankings, samples, counter, weight)
        return math.fsum(_gain(one, sample.target) for one, sample in zip(ranked, samples, strict=True))

    return max(weights, key=lambda weight: (round(gain(weight), 9), -weight))


def _gain(ranking: Ranking, target: int) -> float:
    place = next((rank for rank, items in enumerate(ranking.places) if target in items), None)
    return ndcg_at_k(place, k=10)


def verdict(
    mixture: Measured, parts: Mapping[str, Measured], weight: float, *, seed: int, num_draws: int
) -> MixtureVerdict:
    """Compare a mixture with each of its parts, row by row."""
    names = [name for name in DECIDED_BY if name in mixture.columns] or list(mixture.columns)[:1]
    over = {
        part: {name: difference(mixture, one, name, seed=seed, num_draws=num_draws) for name in names}
        for part, one in parts.items()
    }
    return MixtureVerdict(weight, over)
