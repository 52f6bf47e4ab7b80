"""Numbers of a run as columns."""

import math

from rft.report.columns import MOST_POINTS, columns


def test_rows_become_columns_with_gaps() -> None:
    found = columns([{"step": 1, "a": 1, "word": "x"}, {"b": 2}, {"step": 3, "a": math.nan, "b": 0.123456789}])
    assert (found.steps, found.steps_a_point) == ([1.0, 3.0], 1)
    assert found.series == {"a": [1.0, None], "b": [None, 0.123457]}


def test_a_long_run_is_averaged_over_neighbouring_steps() -> None:
    rows = [{"step": step, "a": step % 2} for step in range(1, 2 * MOST_POINTS + 2)]
    found = columns(rows)
    assert found.steps_a_point == 3
    assert len(found.steps) == len(found.series["a"]) <= MOST_POINTS
    assert found.steps[:2] == [3.0, 6.0]
    assert found.series["a"][:2] == [0.666667, 0.333333]


def test_names_can_be_chosen_by_their_beginning() -> None:
    assert list(columns([{"step": 1, "eval/loss": 1.0, "n": 2}], prefix="eval/").series) == ["eval/loss"]
