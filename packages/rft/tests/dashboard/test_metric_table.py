"""Numbers of a run by name and step."""

import math
from typing import Any

import pytest

from rft.dashboard import metric_table
from rft.dashboard.metric_table import MetricTable
from rft.report.columns import MOST_POINTS


def table_of(rows: list[dict[str, Any]]) -> MetricTable:
    table = MetricTable()
    table.add(rows)
    return table


def test_a_place_without_a_number_is_empty() -> None:
    table = table_of([{"step": 1, "a": 1}, {"a": 9}, {"step": 2, "b": 0.5, "a": math.nan, "word": "x"}])
    found = table.thinned(["a", "b", "none"])
    assert found.steps == [1, 2]
    assert found.series == {"a": [1, None], "b": [None, 0.5]}
    assert (found.rows_a_point, table.names) == (1, ["a", "b"])


def test_only_points_that_a_page_lacks_are_given() -> None:
    table = table_of([{"step": step, "a": step} for step in range(10)])
    first = table.thinned(["a"])
    table.add([{"step": 10, "a": 10}])
    second = table.thinned(["a"], rows_a_point=first.rows_a_point, start=first.complete)
    assert (second.start, second.steps, second.series) == (10, [10], {"a": [10]})
    assert table.thinned(["a"], rows_a_point=2, start=5).start == 0
    assert table.thinned(["a"], rows_a_point=1, start=99).start == 0


def test_points_of_a_long_run_stay_as_they_are_while_it_grows() -> None:
    rows = [{"step": step, "a": step % 2} for step in range(2 * MOST_POINTS + 1)]
    table = table_of(rows)
    first = table.thinned(["a"])
    assert (first.rows_a_point, first.complete, len(first.steps)) == (4, MOST_POINTS // 2, MOST_POINTS // 2 + 1)
    assert first.series["a"][:3] == [0.5, 0.5, 0.5]
    assert first.steps[-1] == 2 * MOST_POINTS
    table.add([{"step": 2 * MOST_POINTS + 1, "a": 1}])
    second = table.thinned(["a"], rows_a_point=4, start=first.complete)
    assert (second.start, second.series["a"]) == (first.complete, [0.5])
    assert len(table.thinned(["a"]).steps) <= MOST_POINTS


def test_numbers_whose_sum_is_none_have_a_mean() -> None:
    table = table_of([{"step": step, "a": 1.5e308} for step in range(MOST_POINTS + 2)])
    assert table.thinned(["a"]).series["a"][0] == 1.5e308


def test_names_without_end_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_table, "MOST_NAMES", 2)
    assert table_of([{"step": 1, "a": 1, "b": 2, "c": 3}]).names == ["a", "b"]
