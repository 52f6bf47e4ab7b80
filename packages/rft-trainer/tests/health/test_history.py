"""What is kept of a run, and what counts as a number of a row."""

from __future__ import annotations

import math

import pytest

from rft_trainer.health.history import FIRST, LAST, History, number, numbers


def history(count: int) -> History:
    kept = History()
    for step in range(1, count + 1):
        kept.add({"step": step, "x": float(step), **({"late": 1.0} if step > 5 else {})})
    return kept


@pytest.mark.parametrize("count", [1, FIRST, FIRST + 1, LAST, LAST + 1, LAST + FIRST, 3 * LAST])
def test_first_and_last_rows_are_kept_once_each_and_in_order(count: int) -> None:
    steps = [row["step"] for row in history(count).known()]
    expected = sorted({*range(1, min(FIRST, count) + 1), *range(max(1, count - LAST + 1), count + 1)})
    assert steps == expected


def test_a_window_is_whole_or_nothing() -> None:
    kept = history(7)
    assert kept.series("x", 3) == [5.0, 6.0, 7.0]
    assert kept.series("x", 8) == []
    assert kept.series("late", 2) == [1.0, 1.0]
    assert kept.series("late", 3) == []
    assert kept.series("nothing", 1) == []
    assert [row["step"] for row in kept.recent(2)] == [6, 7]
    assert kept.recent(8) == []
    assert kept.beginning("x", 2) == [1.0, 2.0]
    assert kept.beginning("late", 9) == [1.0, 1.0]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "1", True, [1.0]])
def test_what_is_no_finite_number_is_absent(value: object) -> None:
    # a live row has NaN where its line in the file has null
    assert number({"x": value}, "x") is None
    assert number({}, "x") is None
    assert numbers([{"x": value}, {"x": 2}], "x") == [2.0]


def test_a_constant_reward_of_many_responses_is_found_early() -> None:
    kept = History()
    for step in (1, 2, 3):
        assert kept.known() == [] or kept.findings() == []
        kept.add({"step": step, "reward/min": 0.0, "reward/max": 0.0, "data/samples": 500})
    assert [found.code for found in kept.findings()] == ["constant_reward"]
