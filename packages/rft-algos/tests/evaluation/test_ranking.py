"""Measures of ranked lists against hand-computed values."""

from __future__ import annotations

import math

import pytest

from rft_algos.evaluation.ranking import coverage, hit_at_k, ndcg_at_k, novelty, rank_of
from rft_algos.input_checks import InputError


def test_the_rank_is_the_place_of_the_target() -> None:
    assert [rank_of([7, 3, 5], target) for target in (7, 5, 9)] == [0, 2, None]


@pytest.mark.parametrize(("rank", "k", "hit"), [(0, 1, 1.0), (1, 1, 0.0), (2, 3, 1.0), (3, 3, 0.0), (None, 50, 0.0)])
def test_a_hit_is_within_the_first_k(rank: int | None, k: int, hit: float) -> None:
    assert hit_at_k(rank, k=k) == hit


def test_the_gain_falls_with_the_logarithm_of_the_place() -> None:
    assert [ndcg_at_k(rank, k=3) for rank in (0, 1, 2, 3, None)] == [1.0, 1 / math.log2(3), 0.5, 0.0, 0.0]


def test_a_hit_on_what_items_share_counts_its_share() -> None:
    assert hit_at_k(0, k=1, num_sharing=4) == 0.25
    assert ndcg_at_k(2, k=3, num_sharing=2) == 0.25


def test_coverage_counts_what_any_list_shows() -> None:
    assert coverage([[1, 2, 9], [2, 3, 8]], k=2, num_items=6) == 0.5


def test_novelty_is_the_mean_information_of_what_is_shown() -> None:
    # shares (2 + 1) / 4 and (0 + 1) / 4
    assert novelty([[0, 1]], {0: 2}, k=2, num_items=2) == pytest.approx((-math.log2(3 / 4) + 2) / 2)
    assert novelty([[0, 1]], {0: 2}, k=1, num_items=2) == pytest.approx(-math.log2(3 / 4))
    assert novelty([], {}, k=1, num_items=2) == 0.0


def test_places_and_shares_are_at_least_one() -> None:
    for call in (
        lambda: hit_at_k(0, k=0),
        lambda: hit_at_k(0, k=1, num_sharing=0),
        lambda: coverage([], k=1, num_items=0),
    ):
        with pytest.raises(InputError):
            call()
