"""picked@k against hand-computed picks and against every draw of k samples, picked one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from rft_algos.evaluation.picked_sample import picked_at_k_estimate
from rft_algos.input_checks import InputError
from rft_algos.statistics import pass_at_k_estimate


def plain(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """Every draw of k, and of the samples with the highest score each in turn."""
    found: list[float] = []
    for drawn in itertools.combinations(range(len(scores)), k):
        highest = max(scores[i] for i in drawn)
        values = [correct[i] for i in drawn if scores[i] == highest]
        found.append(sum(values) / len(values))
    return sum(found) / len(found)


def test_hand_computed_picks() -> None:
    # the draws (3, 1), (3, 2), (1, 2) of scores
    assert picked_at_k_estimate([3, 1, 2], [1, 0, 0], k=2) == pytest.approx(2 / 3)
    assert picked_at_k_estimate([3, 1, 2], [0, 0, 1], k=2) == pytest.approx(1 / 3)
    assert picked_at_k_estimate([3, 1, 2], [0, 1, 1], k=3) == 0.0
    assert picked_at_k_estimate([3, 3, 2], [0, 1, 1], k=3) == 0.5
    assert picked_at_k_estimate([-math.inf, -math.inf], [0, 1], k=2) == 0.5


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_is_the_mean_over_all_draws(seed: int) -> None:
    drawn = random.Random(seed)
    num = drawn.randint(1, 9)
    scores = [drawn.choice([-1.0, 0.0, 0.5, 2.0, -math.inf]) for _ in range(num)]
    correct = [drawn.choice([0.0, 1.0, 0.5]) for _ in range(num)]
    for k in range(1, num + 1):
        assert picked_at_k_estimate(scores, correct, k=k) == pytest.approx(plain(scores, correct, k), abs=1e-12)


def test_the_best_score_is_pass_at_k_and_none_at_all_the_mean() -> None:
    correct = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    for k in range(1, 8):
        assert picked_at_k_estimate(correct, correct, k=k) == pytest.approx(pass_at_k_estimate(2, 7, k=k))
        assert picked_at_k_estimate([0.3] * 7, correct, k=k) == pytest.approx(2 / 7)


@pytest.mark.parametrize(
    ("scores", "correct", "k"), [([1.0], [1.0], 2), ([1.0], [1.0], 0), ([1.0], [], 1), ([math.nan], [1.0], 1)]
)
def test_other_input_is_refused(scores: list[float], correct: list[float], k: int) -> None:
    with pytest.raises(InputError):
        picked_at_k_estimate(scores, correct, k=k)
