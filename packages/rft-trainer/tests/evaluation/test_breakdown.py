"""Accuracy by the values of a column."""

from __future__ import annotations

from typing import Any

import pytest

from rft_algos.statistics import wilson_interval
from rft_core.errors import DataError
from rft_trainer.evaluation.breakdown import accuracy_by, require_column
from rft_trainer.records.rollouts import Prompt


def prompts(*levels: Any) -> list[Prompt]:
    return [Prompt(f"p:{n}", (1,), "1", "1", "p", columns={"level": level}) for n, level in enumerate(levels)]


def test_values_are_in_order_and_rows_without_a_score_are_in_none() -> None:
    found = accuracy_by("level", prompts(10, 2, 2, 2), [1.0, 1.0, 0.0, None])
    assert list(found) == ["2", "10"]
    assert (found["2"], found["10"]) == (wilson_interval(1, 2), wilson_interval(1, 1))
    assert list(accuracy_by("level", prompts("b", "Level 2", "a", True), [1.0] * 4)) == ["Level 2", "a", "b", "true"]


def test_a_column_that_a_row_lacks_is_refused_with_the_nearest() -> None:
    require_column("level", prompts(1))
    with pytest.raises(DataError) as caught:
        require_column("levle", prompts(1))
    assert (caught.value.problem.code, caught.value.problem.do) == ("eval.no_column", "--eval_by level")
    with pytest.raises(DataError) as caught:
        require_column("zzzz", prompts(1))
    assert caught.value.problem.do == "--eval_by with one of these columns"
