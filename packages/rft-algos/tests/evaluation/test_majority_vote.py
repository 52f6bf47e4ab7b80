"""maj@k against hand-computed values and against every draw of k samples, voted one by one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from rft_algos.evaluation.majority_vote import majority_at_k_estimate
from rft_algos.input_checks import InputError


def plain(votes: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Every draw of k, and of the answers with most votes each in turn."""
    found: list[float] = []
    for drawn in itertools.combinations(range(len(votes)), k):
        counts = Counter(votes[i] for i in drawn if votes[i] is not None)
        most = [answer for answer, number in counts.items() if number == max(counts.values())]
        values = [[c for v, c in zip(votes, correct, strict=True) if v == answer] for answer in most]
        found.append(sum(sum(group) / len(group) for group in values) / len(most) if most else 0.0)
    return sum(found) / len(found)


def test_hand_computed_votes() -> None:
    # the draws (5, 5), (5, 7), (5, 7): 0, and twice a tie
    assert majority_at_k_estimate(["5", "5", "7"], [0, 0, 1], k=2) == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert majority_at_k_estimate(["5", "5", "7"], [0, 0, 1], k=3) == 0.0
    assert majority_at_k_estimate(["5", "5", "7"], [1, 1, 0], k=3) == 1.0
    assert majority_at_k_estimate(["5", "6", "7"], [1, 0, 0], k=3) == pytest.approx(1 / 3)


def test_a_sample_without_an_answer_has_no_vote_and_no_answer_at_all_is_wrong() -> None:
    assert majority_at_k_estimate([None, None, "7"], [0, 0, 1], k=3) == 1.0
    assert majority_at_k_estimate([None, None, "7"], [0, 0, 1], k=1) == pytest.approx(1 / 3)
    assert majority_at_k_estimate([None, None], [0, 0], k=2) == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_the_estimate_is_the_mean_over_all_draws(seed: int) -> None:
    drawn = random.Random(seed)
    num = drawn.randint(1, 9)
    votes = [drawn.choice(["a", "b", "c", "d", None]) for _ in range(num)]
    # one answer is right, and now and then a grader is of two minds about it
    correct = [float(vote == "a") if drawn.random() < 0.9 else 0.5 for vote in votes]
    for k in range(1, num + 1):
        assert majority_at_k_estimate(votes, correct, k=k) == pytest.approx(plain(votes, correct, k), abs=1e-12)


def test_many_samples_of_many_answers_take_no_enumeration() -> None:
    votes = [str(number % 40) for number in range(128)]
    correct = [float(vote == "0") for vote in votes]
    assert 0.0 < majority_at_k_estimate(votes, correct, k=64) < 0.2


@pytest.mark.parametrize(("votes", "correct", "k"), [(["a"], [1.0], 2), (["a"], [1.0], 0), (["a"], [], 1)])
def test_other_input_is_refused(votes: list[str], correct: list[float], k: int) -> None:
    with pytest.raises(InputError):
        majority_at_k_estimate(votes, correct, k=k)
