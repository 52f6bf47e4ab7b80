"""Rows as objects: which are taken, what is written, and which value is refused with its row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.library.given_rows import cache_directory, rows_file
from rft_core.errors import DataError, OptionsError

ROWS: list[dict[str, Any]] = [{"input": "2+3=", "label": 5}, {"input": "Ä", "label": {"a": [1.5, None, True]}}]


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("given", ["a.jsonl", "openai/gsm8k:main", "a.jsonl,b.jsonl"])
def test_names_and_paths_stay_as_they_are(given: str) -> None:
    assert rows_file(given, "data") == given
    assert rows_file(Path("a/b.jsonl"), "data") == "a/b.jsonl"


def test_rows_are_written_once_under_their_content(own_cache: Path) -> None:
    path = Path(rows_file(ROWS, "data"))
    assert path.parent == own_cache / "rows"
    assert path.name.startswith("data-")
    assert lines(str(path)) == ROWS
    before = path.stat().st_mtime_ns
    assert rows_file(tuple(ROWS), "data") == str(path)
    assert path.stat().st_mtime_ns == before
    assert rows_file(ROWS[:1], "data") != str(path)
    assert Path(rows_file(ROWS, "eval_data")).name.startswith("eval_data-")


def test_tables_of_other_libraries_are_rows() -> None:
    import datasets
    import pandas

    expected = [{"input": "a", "label": 1}, {"input": "b", "label": 2}]
    assert lines(rows_file(datasets.Dataset.from_list(expected), "data")) == expected
    assert lines(rows_file(pandas.DataFrame(expected), "data")) == expected
    with pytest.raises(OptionsError, match=r"data=DATA\['train'\]"):
        rows_file(datasets.DatasetDict({"train": datasets.Dataset.from_list(expected)}), "data")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (5, "data is of type int"),
        ([], "data is empty"),
        ([1], "data is row 1 of type int"),
        ([{"input": "a"}, "b"], "data is row 2 of type str"),
        ({}, "data is a mapping with "),
        ({"train": ROWS}, "data is a mapping with train"),
    ],
)
def test_what_is_no_row_is_refused(given: object, what: str) -> None:
    with pytest.raises(OptionsError) as caught:
        rows_file(given, "data")
    assert caught.value.problem.what == what


@pytest.mark.parametrize(
    "value", [{1, 2}, float("nan"), float("inf"), object(), b"x"], ids=["set", "nan", "inf", "object", "bytes"]
)
def test_a_value_that_json_lacks_is_named_with_row_and_column(value: object, own_cache: Path) -> None:
    with pytest.raises(DataError, match=r"row 2 of data, column 'label'") as caught:
        rows_file([ROWS[0], {"input": "a", "label": value}], "data")
    assert caught.value.problem.where == "data[1]['label']"
    assert not (own_cache / "rows").exists()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RFT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "rft"
    monkeypatch.setenv("RFT_CACHE", "~/other")
    assert cache_directory() == tmp_path / "other"
