"""Ranking by scores: the best first, ties by number, unknown items refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rft_core.errors import OptionsError
from rft_genrec.baselines.recommender import ScoredRanking, Scores, best


class _Fixed(ScoredRanking):
    num_items = 4

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        return np.array([[0.1, 0.4, 0.4, 0.2]] * len(histories))


def test_equal_scores_are_in_the_order_of_the_numbers() -> None:
    [found] = best(np.array([[0.5, 0.9, 0.5, 0.9]]), 3)
    assert found.items == (1, 3, 0)
    assert found.scores == (0.9, 0.9, 0.5)


def test_more_places_than_items_give_all_items() -> None:
    assert _Fixed().rank([[0]], 10)[0].items == (1, 2, 3, 0)


def test_many_histories_are_ranked_each() -> None:
    assert [one.items for one in _Fixed().rank([[]] * 600, 1)] == [(1,)] * 600


def test_one_item_has_its_score() -> None:
    assert _Fixed().score([0], 3) == 0.2


@pytest.mark.parametrize("item", [4, -1])
def test_an_item_outside_the_catalogue_is_refused(item: int) -> None:
    with pytest.raises(OptionsError, match=f"history 1 holds item {item}"):
        _Fixed().rank([[0], [item]], 1)
