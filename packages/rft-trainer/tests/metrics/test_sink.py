"""Numbers of a record by flat names, and those of an evaluation apart from those of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, scalars


@pytest.mark.parametrize(
    ("record", "numbers"),
    [
        ({"step": 3, "a": 1, "b": 0.5}, {"a": 1, "b": 0.5}),
        ({"a": True, "b": None, "c": "1", "d": [1]}, {}),
        ({"a": {"b": {"c": 2, "d": "x"}, "step": 1}, "e": 0}, {"a/b/c": 2, "a/step": 1, "e": 0}),
        ({"step": {"a": 1}}, {"step/a": 1}),
    ],
)
def test_numbers_are_named_by_their_path_and_a_step_is_none(record: dict[str, Any], numbers: dict[str, float]) -> None:
    assert scalars(record) == numbers


def test_numbers_of_an_evaluation_stand_under_its_own_names() -> None:
    record = {"step": 2, "eval/a": 1, "eval_ema/b": 2, "c": 3, "evaluation/d": 4}
    assert evaluation_scalars(record) == {"eval/a": 1, "eval_ema/b": 2, "eval/c": 3, "eval/evaluation/d": 4}


def test_a_run_has_no_settings_and_began_anew_where_nothing_is_said(tmp_path: Path) -> None:
    info = RunInfo("name", tmp_path)
    assert (info.config, info.resumed_from_step) == ({}, None)
