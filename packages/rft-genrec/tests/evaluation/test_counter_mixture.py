"""Mixtures of a model and a counter: the formula, the choice of the weight, the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rft_genrec.baselines.recommender import ScoredRanking, Scores
from rft_genrec.catalogue.records import Sample
from rft_genrec.evaluation.counter_mixture import chosen_weight, mixed, verdict
from rft_genrec.evaluation.measures import Truth, measure
from rft_genrec.evaluation.rankings import Ranking

SHARES = [0.05, 0.1, 0.25, 0.6]


class Fixed(ScoredRanking):
    """A counter that says the same of every history."""

    num_items = 4

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        return np.array([SHARES] * len(histories))


def beams(number: int = 0) -> Ranking:
    return Ranking(f"t:{number}", ((0,), (1,)), (-0.5, -1.0))


def test_scores_are_the_sum_of_logarithms_and_the_counters_best_are_candidates() -> None:
    [found] = mixed([beams()], [Sample("t:0", "u", (), 0)], Fixed(), 0.5)
    expected = {
        0: -0.5 + 0.5 * math.log(0.05),
        1: -1.0 + 0.5 * math.log(0.1),
        # no beam has them: they have the score of the last beam
        2: -1.0 + 0.5 * math.log(0.25),
        3: -1.0 + 0.5 * math.log(0.6),
    }
    order = sorted(expected, key=lambda item: -expected[item])[:2]
    assert found.items(2) == order
    assert found.scores == pytest.approx([expected[item] for item in order])


def test_without_weight_it_is_the_model() -> None:
    [found] = mixed([beams()], [Sample("t:0", "u", (), 0)], Fixed(), 0.0)
    assert found == beams()


def test_items_of_one_place_are_told_apart_by_the_counter() -> None:
    [found] = mixed([Ranking("t:0", ((0, 3),), (-1.0,))], [Sample("t:0", "u", (), 3)], Fixed(), 0.1)
    assert found.items(1) == [3]


@pytest.mark.parametrize(("target", "weight"), [(0, 0.0), (3, 2.0)])
def test_the_weight_is_the_one_that_ranks_held_out_samples_best(target: int, weight: float) -> None:
    samples = [Sample(f"t:{n}", "u", (), target) for n in range(3)]
    rankings = [beams(n) for n in range(3)]
    assert chosen_weight(rankings, samples, Fixed(), (0.0, 0.2, 2.0)) == weight


def test_a_mixture_counts_where_it_beats_both_parts_beyond_chance() -> None:
    samples = tuple(Sample(f"t:{n}", "u", (), n % 2) for n in range(60))

    def measured(items: Sequence[int]) -> object:
        rankings = [Ranking(s.sample_id, ((item,),), (1.0,)) for s, item in zip(samples, items, strict=True)]
        return measure(rankings, Truth(samples, None, {}, 4), [1])

    right, zero, few = (
        measured([f(n) for n in range(60)]) for f in (lambda n: n % 2, lambda n: 0, lambda n: n % 2 if n else 1)
    )
    better = verdict(right, {"model": zero, "counter": zero}, 0.5, seed=1, num_draws=200)  # type: ignore[arg-type]
    assert better.counts
    assert better.over["model"]["HR@1"].estimate == 0.5
    assert not verdict(right, {"model": zero, "counter": few}, 0.5, seed=1, num_draws=200).counts  # type: ignore[arg-type]
