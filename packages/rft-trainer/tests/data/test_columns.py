"""A column that a row lacks is named with a remedy that cannot train on another use's column."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.data.columns import MissingColumnError
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.rows import Row


def refused(*records: dict[str, Any], **keys: Any) -> MissingColumnError:
    rows = [Row(record, "a.jsonl", number) for number, record in enumerate(records, start=1)]
    with pytest.raises(MissingColumnError) as caught:
        prompts_from_rows(rows, source="a", **{"input_key": "input", **keys})
    return caught.value


NONE = "--{} with the field that holds it, or give the rows the field {}"
"""What is said where no column can be meant."""

CASES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    # the prompt is never proposed as what is learned or compared with
    (
        {"question": "?", "other": "x"},
        {"input_key": "question", "output_key": "output"},
        NONE.format("output_key", "output"),
    ),
    ({"input": "?", "note": "x"}, {"label_key": "label"}, NONE.format("label_key", "label")),
    ({"question": "?", "answer": "x"}, {"input_key": "question", "output_key": "output"}, "--output_key answer"),
    ({"input": "?", "answers": "x"}, {"label_key": "answer"}, "--label_key answers"),
    ({"input": "?", "labels": "x", "input2": "y"}, {"label_key": "label"}, "--label_key labels"),
    ({"prompt": "?", "answer": "x"}, {"label_key": "answer"}, "--input_key prompt"),
    ({"id": 3, "answer": "x"}, {"label_key": "answer"}, NONE.format("input_key", "input")),
    (
        {"input": "?", "reward_model": {"ground_truth": "7"}},
        {"label_key": "label"},
        "--label_key reward_model.ground_truth",
    ),
    # what is neither text nor number is no label
    ({"input": "?", "labels": ["x"], "answer": None}, {"label_key": "label"}, NONE.format("label_key", "label")),
    ({"messages": [{"role": "user", "content": "?"}]}, {}, "--input_key messages"),
]


@pytest.mark.parametrize(("record", "keys", "do"), CASES)
def test_the_remedy_names_a_column_that_can_be_meant_or_none(
    record: dict[str, Any], keys: dict[str, str], do: str
) -> None:
    error = refused(record, record, **keys)
    assert error.in_no_row
    assert error.problem.do == do


def test_a_row_that_alone_lacks_the_column_is_named_and_the_column_stays() -> None:
    good = {"input": "?", "label": "1", "answer": "1"}
    error = refused(good, {"input": "?", "answer": "1"}, good, label_key="label")
    assert (error.flag, error.in_no_row) == ("--label_key", False)
    assert "1 of 3 rows lack it" in error.problem.what
    assert error.problem.where == "a.jsonl:2:label"
    assert error.problem.do == "give a.jsonl:2 the field label, or remove it"


def test_a_proposed_column_is_one_that_can_be_read() -> None:
    record = {"input": "?", "reward_model": {"ground_truth": "7"}}
    flag, column = refused(record, label_key="ground_truth").problem.do.split()
    assert flag == "--label_key"
    (prompt,) = prompts_from_rows([Row(record, "a.jsonl", 1)], source="a", input_key="input", label_key=column)
    assert prompt.label == "7"
