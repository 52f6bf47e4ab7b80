"""Rows of JSON Lines and of JSON files: which lines they are on, what is refused, and what is proposed instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.readers.json import read_json, read_jsonl
from rft_trainer.data.readers.rows import SkipLog

MARK = b"\xef\xbb\xbf"


def rows(path: Path, content: bytes, skips: SkipLog | None = None) -> list[tuple[dict[str, Any], int]]:
    path.write_bytes(content)
    read = read_json if path.suffix == ".json" else read_jsonl
    found = read(path, skips or SkipLog(limit=0))
    assert {row.file for row in found} == {str(path)}
    return [(dict(row.fields), row.line) for row in found]


def refused(path: Path, content: bytes) -> Any:
    with pytest.raises(DataError) as caught:
        rows(path, content)
    return caught.value.problem


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'[{"a": 1}, {"a": 2},\n\n {"a": 3}\n,{"a": 4}]\n', [(1, 1), (2, 1), (3, 3), (4, 4)]),
        (b'{"meta": {"x": [1]}, "data":\n[{"a": 1},\n{"a": 2}\n], "more": 3}', [(1, 2), (2, 3)]),
        (MARK + b'\n{"data": [{"a": "\\n"}\n\t, {"a": 2}]}', [("\n", 2), (2, 3)]),
        (b'{"data": [{"a": [1,\n2]}, {"a": 2}]}', [([1, 2], 1), (2, 2)]),
    ],
)
def test_rows_of_a_document_know_the_line_on_which_they_begin(
    tmp_path: Path, content: bytes, expected: list[tuple[Any, int]]
) -> None:
    assert rows(tmp_path / "a.json", content) == [({"a": value}, line) for value, line in expected]


def test_rows_of_lines_know_theirs_and_blank_lines_are_counted(tmp_path: Path) -> None:
    content = MARK + b'{"a": 1}\r\n\n \t\n  {"a": {"b": [1.5, true, null]}}  \n{"a": "\\ud83d\\ude00 \xc3\xa9"}'
    found = rows(tmp_path / "a.jsonl", content)
    assert found == [({"a": 1}, 1), ({"a": {"b": [1.5, True, None]}}, 4), ({"a": "\U0001f600 é"}, 5)]


def test_a_byte_order_mark_stands_at_the_beginning_of_a_file_alone(tmp_path: Path) -> None:
    problem = refused(tmp_path / "a.jsonl", b'{"a": 1}\n' + MARK + b'{"a": 2}\n')
    assert (problem.code, problem.where) == ("data.bad_json", f"{tmp_path / 'a.jsonl'}:2:1")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b'{"data": [{"a": 1}],\n"data": [{"a": 2}]}', "2:data"),
        (b'{"data": 3,\n\n"data": [{"a": 2}]}', "3:data"),
        (b'{"n": 1, "n": 2, "data": [{"a": 2}]}', "1:n"),
        (b'{"m": {"n": 1,\n"n": 2}, "data": [{"a": 2}]}', "1:n"),
        (b'{"data": [{"a": 1},\n{"n": 1, "n": 2}]}', "2:n"),
    ],
)
def test_a_key_that_occurs_twice_is_refused_wherever_it_stands(tmp_path: Path, content: bytes, where: str) -> None:
    problem = refused(tmp_path / "a.json", content)
    assert (problem.code, problem.where) == ("data.refused_value", f"{tmp_path / 'a.json'}:{where}")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b'{1: 2, "data": [{"a": 1}]}', "1:2"),
        (b'{"n": 1,\n[2]: 3, "data": [{"a": 1}]}', "2:1"),
        (b'{"n"; 1}', "1:5"),
        (b'{"n": 1; "m": 2}', "1:8"),
        (b'[{"a": 1}; {"a": 2}]', "1:10"),
        (b'{"data": [{"a": 1}]]', "1:20"),
    ],
)
def test_what_is_no_json_is_told_by_line_and_column(tmp_path: Path, content: bytes, where: str) -> None:
    problem = refused(tmp_path / "a.json", content)
    assert (problem.code, problem.where) == ("data.bad_json", f"{tmp_path / 'a.json'}:{where}")
    assert problem.do == f"correct {tmp_path / 'a.json'}:{where.partition(':')[0]}"


@pytest.mark.parametrize(
    ("name", "content", "do"),
    [
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "mv {file} {folder}/a.jsonl"),
        ("a.json", b'[{"a": 1}, {"a": 2', "copy {file} again from its source"),
        ("a.json", b'[{"a": "cut', "copy {file} again from its source"),
        ("a.jsonl", b'{"a": 1}\n{"a": "cut', "copy {file} again from its source"),
        ("a.jsonl", b'{"a": 1}\n{"a": "cut\n{"a": 2}\n', "correct {file}:2"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 2}\n', "correct {file}:2"),
    ],
)
def test_the_remedy_is_that_of_the_mistake(tmp_path: Path, name: str, content: bytes, do: str) -> None:
    file = tmp_path / name
    assert refused(file, content).do == do.format(file=file, folder=tmp_path)


def test_a_row_that_ends_too_early_is_told_by_its_own_line(tmp_path: Path) -> None:
    for line_end in (b"\n", b"\r\n"):
        problem = refused(tmp_path / "a.jsonl", line_end.join([b'{"a": 1}', b'{"a": ', b'{"a": 2}', b""]))
        assert (problem.code, problem.where) == ("data.cut", f"{tmp_path / 'a.jsonl'}:2:7")


def test_an_object_without_rows_is_told_with_the_keys_that_it_has(tmp_path: Path) -> None:
    problem = refused(tmp_path / "a.json", b'{"rows": [{"a": 1}], "n": 2}')
    assert "2 keys: ['rows', 'n']" in problem.what
    assert (problem.code, problem.where) == ("data.refused_value", f"{tmp_path / 'a.json'}:1:data")


def test_half_of_a_pair_of_surrogates_is_refused_in_the_row_that_has_it(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", b'{"a": "\\\\ud83d"}\n{"a": ["x", "\\uD83D x"]}\n'),
        ("a.json", b'[{"a": "\\\\ud83d"},\n{"\\ude00": 1}]'),
    ):
        problem = refused(tmp_path / name, content)
        assert (problem.code, problem.where) == ("data.surrogate", f"{tmp_path / name}:2")
    assert "U+DE00" in problem.what


def test_rows_that_are_no_objects_are_passed_over_up_to_the_limit(tmp_path: Path) -> None:
    skips = SkipLog(limit=2)
    assert rows(tmp_path / "a.json", b'[3,\n{"a": 1},\n"x", {"a": 2}]', skips) == [({"a": 1}, 2), ({"a": 2}, 3)]
    assert [error.problem.where for error in skips.problems] == [f"{tmp_path / 'a.json'}:{line}" for line in (1, 3)]
    assert {error.problem.code for error in skips.problems} == {"data.not_an_object"}
    with pytest.raises(DataError) as caught:
        rows(tmp_path / "b.json", b"[3]", SkipLog(limit=2))
    assert caught.value.problem.code == "data.no_rows"


def test_places_in_a_file_are_counted_over_rows_that_were_passed_over(tmp_path: Path) -> None:
    content = MARK + b'bad\n{"a": 1}\n{"a": "\xff"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    skips = SkipLog(limit=5)
    assert len(read_jsonl(tmp_path / "a.jsonl", skips)) == 1
    first, second = (error.problem for error in skips.problems)
    assert (first.code, second.code) == ("data.bad_json", "data.not_utf8")
    assert f"byte {content.index(255)} " in second.what


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
@pytest.mark.parametrize(
    ("name", "around"), [("a.jsonl", b'{"a": 1}\n{"a": %s}'), ("a.json", b'[{"a": 1},\n{"a": %s}]')]
)
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, name: str, around: bytes, value: bytes) -> None:
    problem = refused(tmp_path / name, around % value)
    assert (problem.code, problem.where) == ("data.refused_value", f"{tmp_path / name}:2")


def test_the_largest_numbers_are_kept(tmp_path: Path) -> None:
    content = b'{"a": 1.7976931348623157e308, "b": 123456789012345678901234567890}\n'
    assert rows(tmp_path / "a.jsonl", content) == [
        ({"a": 1.7976931348623157e308, "b": 123456789012345678901234567890}, 1)
    ]
