"""Rankings as records."""

from __future__ import annotations

import pytest

from rft_genrec.baselines.recommender import RankedItems
from rft_genrec.evaluation.rankings import Ranking, rankings_of


def test_items_of_one_place_come_in_its_order() -> None:
    ranking = Ranking("test:0", ((4,), (9, 2), (1,)), (-1.0, -2.0, -3.0))
    assert ranking.items(2) == [4, 9]
    assert ranking.items(9) == [4, 9, 2, 1]


def test_a_ranking_is_read_as_it_was_written() -> None:
    ranking = Ranking("test:0", ((4,), (9, 2)), (-1.0, -2.0))
    assert Ranking.from_record(ranking.as_record()) == ranking


@pytest.mark.parametrize(
    "record", [{}, {"sample_id": "a", "places": [[1]], "scores": []}, {"sample_id": 1, "places": [], "scores": []}]
)
def test_another_record_is_no_ranking(record: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Ranking.from_record(record)


def test_a_baseline_has_one_item_a_place() -> None:
    [found] = rankings_of([RankedItems((3, 1), (0.5, 0.2))], ["test:7"])
    assert found == Ranking("test:7", ((3,), (1,)), (0.5, 0.2))
