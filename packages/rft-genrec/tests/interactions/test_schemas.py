"""Declared columns, and rows that are read by them."""

from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_genrec.interactions.schemas import Column, RowPolicy, RowReader

COLUMNS = (
    Column("who", "name", "the person"),
    Column("when", "time", "the time"),
    Column("about", "texts", "what is said", required=False),
    Column("note", "text", "a note", required=False),
)
ROW: dict[str, Any] = {"who": "ann", "when": 5}


def read(*rows: dict[str, Any], skips: bool = False) -> tuple[list[Any], RowPolicy]:
    policy = RowPolicy(skips)
    return [*RowReader(Path("f.csv"), COLUMNS, policy).read(enumerate(rows, 1))], policy


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0),
        (1456790400.9, 1456790400),
        ("1456790400", 1456790400),
        ("1456790400.5", 1456790400),
        ("2016-03-01", 1456790400),
        ("2016-03-01T00:00", 1456790400),
        ("2016-03-01T01:00+01:00", 1456790400),
    ],
)
def test_times_are_seconds_in_utc(given: object, seconds: int) -> None:
    assert read(ROW | {"when": given})[0] == [("ann", seconds, [], "")]


@pytest.mark.parametrize(
    "given",
    [
        -1,
        float("nan"),
        float("inf"),
        True,
        "nan",
        "-5",
        "1e9",
        "1456790400000",
        4102444801,
        "soon",
        "",
        None,
        "٣",
        "9" * 5000,
    ],
)
def test_what_is_no_time_is_refused(given: object) -> None:
    with pytest.raises(DataError, match="row 1, column when: expected seconds from 1970 to 2100") as caught:
        read(ROW | {"when": given})
    assert caught.value.problem.where == "f.csv:1:2"


@pytest.mark.parametrize("given", ["", " ", "a\tb", "a\nb", "a\0", None, 1.5, ["a"], True])
def test_what_is_no_name_is_refused(given: object) -> None:
    with pytest.raises(DataError, match="column who"):
        read(ROW | {"who": given})


def test_texts_may_be_lists_of_lists() -> None:
    assert read(ROW | {"about": [["a", "b"], "c"], "who": 7})[0] == [("7", 5, ["a", "b", "c"], "")]
    for given in ([["a", ["b"]]], [1], {"a": 1}, "a\0", 3):
        with pytest.raises(DataError, match="column about"):
            read(ROW | {"about": given})


def test_rows_are_left_out_and_counted_where_that_is_wanted() -> None:
    rows, policy = read(ROW, ROW | {"when": "soon"}, ROW | {"who": ""}, ROW, skips=True)
    assert len(rows) == 2
    assert (policy.checked, policy.refused) == (4, 2)
    assert policy.first is not None
    assert "'soon'" in policy.first.problem.what


def test_a_heading_names_every_column_once() -> None:
    reader = RowReader(Path("f.csv"), COLUMNS)
    reader.check_heading(["when", "who", "more"])
    with pytest.raises(DataError, match="column when is missing"):
        reader.check_heading(["who"])
    with pytest.raises(DataError, match="column who is there twice"):
        reader.check_heading(["who", "when", "who"])
