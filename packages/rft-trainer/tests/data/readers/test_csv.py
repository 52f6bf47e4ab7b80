"""Records of CSV files: lines, lengths of fields, and what is passed over."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_trainer.data.readers.csv import _checked_header, read_csv
from rft_trainer.data.readers.rows import SkipLog


def write(folder: Path, text: str) -> Path:
    file = folder / "a.csv"
    file.write_text(text)
    return file


def test_records_keep_text_and_the_line_on_which_they_start(tmp_path: Path) -> None:
    file = write(tmp_path, '\na,b\n1,"x\ny"\n\n 2 ,"""q"", r"\n')
    rows = read_csv(file, SkipLog())
    assert [(row.fields, row.line) for row in rows] == [
        ({"a": "1", "b": "x\ny"}, 3),
        ({"a": " 2 ", "b": '"q", r'}, 6),
    ]
    assert {row.file for row in rows} == {str(file)}


@pytest.mark.parametrize("symbol", [",", ";", "\t"])
def test_the_header_says_what_separates_the_fields(tmp_path: Path, symbol: str) -> None:
    file = write(tmp_path, f'\nQ{symbol}A\n1+1{symbol}"2{symbol}5"\n')
    assert [row.fields for row in read_csv(file, SkipLog())] == [{"Q": "1+1", "A": f"2{symbol}5"}]


def test_commas_in_a_header_separate_whatever_else_it_holds(tmp_path: Path) -> None:
    file = write(tmp_path, "a;b,c\n1,2\n")
    assert read_csv(file, SkipLog())[0].fields == {"a;b": "1", "c": "2"}
    assert read_csv(file, SkipLog(), delimiter="\t")[0].fields == {"a;b,c": "1,2"}


def test_a_record_of_another_length_is_passed_over_up_to_the_limit(tmp_path: Path) -> None:
    file = write(tmp_path, "a,b,c\n1,2\n1,2,3\n1,2,3,4\n")
    skips = SkipLog(limit=2)
    assert [row.line for row in read_csv(file, skips)] == [3]
    assert [error.problem.where for error in skips.problems] == [f"{file}:2:c", f"{file}:4:4"]
    with pytest.raises(DataError) as caught:
        read_csv(file, SkipLog(limit=1))
    assert caught.value.problem.where == f"{file}:4:4"


def test_a_header_names_each_column_once(tmp_path: Path) -> None:
    for header, place in (("a, ,b", "2"), ("a,b,a", "a"), ("a,b,c,b", "b")):
        with pytest.raises(DataError) as caught:
            read_csv(write(tmp_path, f"{header}\n1,2,3\n"), SkipLog())
        assert caught.value.problem.code == "data.bad_header"
        assert caught.value.problem.where == f"{tmp_path / 'a.csv'}:1:{place}"


def test_a_field_may_be_longer_than_the_limit_of_the_csv_module_which_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    long = "x" * (before + 1)
    assert [row.fields for row in read_csv(write(tmp_path, f"a\n{long}\n"), SkipLog())] == [{"a": long}]
    assert csv.field_size_limit() == before
    with pytest.raises(DataError):
        read_csv(write(tmp_path, 'a\n"cut'), SkipLog())
    assert csv.field_size_limit() == before


class CountedName(str):
    """A name that counts with how many others it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_names_of_a_wide_header_are_compared_with_few_others(tmp_path: Path) -> None:
    CountedName.comparisons = 0
    names: list[str] = [CountedName(f"column {number}") for number in range(2000)]
    assert _checked_header(names, tmp_path, 1) is names
    assert CountedName.comparisons < 2000
    with pytest.raises(DataError) as caught:
        _checked_header([*names, "column 7"], tmp_path, 1)
    assert caught.value.problem.code == "data.bad_header"
