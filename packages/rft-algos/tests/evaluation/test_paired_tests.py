"""Paired tests against hand-computed values, a plain enumeration, and what they say where nothing changed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from rft_algos.evaluation.paired_tests import mcnemar_exact, sign_flip_test
from rft_algos.input_checks import InputError


def plain_flips(differences: Sequence[float]) -> float:
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(value >= observed - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize(
    ("won", "lost", "expected"),
    # binomial tails by hand
    [(5, 0, 2 / 32), (0, 5, 2 / 32), (1, 0, 1.0), (0, 0, 1.0), (3, 3, 1.0), (8, 2, 2 * (1 + 10 + 45) / 1024)],
)
def test_hand_computed_values_of_mcnemars_test(won: int, lost: int, expected: float) -> None:
    assert mcnemar_exact(won, lost) == pytest.approx(expected)


def test_of_right_and_wrong_both_tests_are_one() -> None:
    for won, lost in [(4, 1), (2, 6), (5, 5)]:
        changes = [1.0] * won + [-1.0] * lost + [0.0] * 3
        assert sign_flip_test(changes, key=0) == pytest.approx(mcnemar_exact(won, lost))


@pytest.mark.parametrize("seed", range(10))
def test_few_differences_are_enumerated(seed: int) -> None:
    drawn = random.Random(seed)
    differences = [round(drawn.gauss(0.5, 1), 1) for _ in range(8)]
    assert sign_flip_test(differences, key=seed) == pytest.approx(plain_flips(differences))


def test_twelve_differences_are_enumerated_and_thirteen_drawn() -> None:
    differences = [1.0, -0.5, 2.0, 0.25, -1.5, 0.75, 1.25, -0.25, 0.5, 1.75, -1.0, 2.25]
    assert sign_flip_test(differences, key=1) == pytest.approx(plain_flips(differences), rel=1e-12)
    assert sign_flip_test([*differences, 0.1], key=1) != pytest.approx(plain_flips([*differences, 0.1]), rel=1e-12)


def test_many_differences_are_drawn_by_the_key_and_come_near_to_all_patterns() -> None:
    drawn = random.Random(3)
    differences = [drawn.gauss(0.4, 1.0) for _ in range(15)]
    found = sign_flip_test(differences, key=1)
    assert found == sign_flip_test(differences, key=1) != sign_flip_test(differences, key=2)
    # four standard errors of a share of 9,999 draws
    assert found == pytest.approx(plain_flips(differences), abs=0.02)


def test_a_large_change_has_the_least_p_and_none_has_1() -> None:
    assert sign_flip_test([1.0] * 40, key=0, num_flips=99) == 1 / 100
    assert sign_flip_test([0.0] * 40, key=0) == sign_flip_test([], key=0) == 1.0


def test_other_input_is_refused() -> None:
    with pytest.raises(InputError):
        mcnemar_exact(-1, 0)
    with pytest.raises(InputError):
        sign_flip_test([1.0], key=0, num_flips=0)
