"""Rows of a killed evaluation: used again where they are whole and of the same evaluation, refused by name else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.evaluation.partial_rows import PartialRows, require_each_once

IDS = ["p:0", "p:1", "p:2"]


def journal(path: Path, **changed: Any) -> PartialRows:
    return PartialRows(path, {"prompts": 3, "seed": 1, **changed}, IDS, 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl.partial"


def begun(path: Path) -> None:
    first = journal(path)
    assert first.done() == {}
    first.keep({0: [[1.0], [0.0]], 2: [[0.5], [0.25]]})


def test_what_was_kept_is_read_again_and_a_torn_line_is_not(path: Path) -> None:
    begun(path)
    with path.open("a") as stream:
        stream.write('{"index": 1, "prompt_id": "p:1", "ro')
    again = journal(path)
    assert again.done() == {0: [[1.0], [0.0]], 2: [[0.5], [0.25]]}
    again.keep({1: [[0.0], [0.0]]})
    assert sorted(journal(path).done()) == [0, 1, 2]
    again.remove()
    assert not path.exists()
    again.remove()


def test_a_kill_costs_at_most_some_hundred_responses(path: Path) -> None:
    assert journal(path).prompts_at_once == 128
    assert PartialRows(path, {}, IDS, 1000).prompts_at_once == 1


def test_rows_of_another_evaluation_are_refused_with_what_differs(path: Path) -> None:
    begun(path)
    with pytest.raises(OptionsError) as caught:
        journal(path, seed=2).done()
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("eval.other_partial", f"rm {path}")
    assert "seed differ; seed was 1 and is 2" in problem.what


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"index": 0, "prompt_id": "p:0", "rows": [[1.0], [0.0]]}, "the rows of p:0 twice"),
        ({"index": 1, "prompt_id": "p:1", "rows": [[1.0]]}, "not 2 rows of p:1"),
        ({"index": 1, "prompt_id": "q:1", "rows": [[1.0], [0.0]]}, "a row of q:1, number 1"),
        ({"index": 9, "prompt_id": "p:9", "rows": [[1.0], [0.0]]}, "a row of p:9, number 9"),
        ("{", "1 lines that are no JSON records"),
    ],
)
def test_rows_that_are_not_whole_are_refused_by_name(path: Path, line: Any, named: str) -> None:
    begun(path)
    with path.open("a") as stream:
        stream.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(DataError) as caught:
        journal(path).done()
    assert named in caught.value.problem.what


def rows(*names: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"prompt_id": prompt_id, "sample": sample} for prompt_id, sample in names]


WHOLE = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (WHOLE[:-1], "b#1 is missing, with 0 others"),
        (WHOLE[2:], "a#0 is missing, with 1 others"),
        ([*WHOLE, ("a", 1)], "a#1 is there twice"),
        ([*WHOLE, ("c", 0)], "c#0 is not among the data"),
        ([*WHOLE, ("a", 2)], "a#2 is not among the data"),
    ],
)
def test_a_missing_a_double_and_a_foreign_row_are_named(names: list[tuple[str, int]], told: str) -> None:
    require_each_once(rows(*WHOLE), ["a", "b"], 2, "rows.jsonl")
    with pytest.raises(DataError) as caught:
        require_each_once(rows(*names), ["a", "b"], 2, "rows.jsonl")
    assert caught.value.problem.what == told
