"""Rows of labelled steps: TRL's columns, and errors that name file, line and field."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.preference_rows.labelled_steps import LabelledSteps, steps_from_rows, steps_hash
from rft_trainer.data.preference_rows.preference_columns import StepKeys
from rft_trainer.data.readers.rows import Row


def read(separator: str = "\n", **fields: Any) -> LabelledSteps:
    row = Row({"prompt": "1+1+1?", "completions": ["a", "b"], "labels": [True, False]} | fields, "rows.jsonl", 7)
    [found] = steps_from_rows([row], source="rows", keys=StepKeys().found_in(list(row.fields)), separator=separator)
    return found


def test_labels_are_true_or_false_numbers_or_absent() -> None:
    assert read().labels == (1.0, 0.0)
    assert read(completions=["a\n", "b", "c", "d"], labels=[1, 0, 0.25, None]).labels == (1.0, 0.0, 0.25, None)
    assert read(completions=["a\n", "\nb"]).steps == ("a", "b"), "as a response is divided"
    assert read().prompt.text == "1+1+1?"


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"labels": [True]}, "rows.jsonl:7:labels", "1 labels for the 2 steps of completions"),
        ({"labels": [True, "no"]}, "rows.jsonl:7:labels[1]", "str 'no'"),
        ({"labels": [True, 2]}, "rows.jsonl:7:labels[1]", "int 2"),
        ({"labels": [None, None]}, "rows.jsonl:7:labels", "no label of 2"),
        ({"completions": ["a", " "]}, "rows.jsonl:7:completions[1]", "the empty step ' '"),
        ({"completions": ["a", 3]}, "rows.jsonl:7:completions[1]", "int 3"),
        ({"completions": [], "labels": []}, "rows.jsonl:7:completions", "an empty list"),
        ({"completions": "a\nb"}, "rows.jsonl:7:completions", "str 'a\\nb'"),
    ],
)
def test_a_row_that_is_wrong_is_told_by_file_line_and_field(fields: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(DataError) as caught:
        read(**fields)
    assert (caught.value.problem.where, caught.value.problem.what) == (where, what)


def test_a_step_with_the_separator_would_be_scored_as_two() -> None:
    with pytest.raises(DataError, match="would be divided there") as caught:
        read(completions=["a\nc", "b"])
    assert caught.value.problem.where == "rows.jsonl:7:completions[0]"
    assert "--step_separator" in caught.value.problem.do
    assert read(separator="\n\n", completions=["a\nc", "b"]).steps == ("a\nc", "b")


def test_the_hash_is_of_labels_too() -> None:
    assert steps_hash([read()]) != steps_hash([read(labels=[True, True])])
