"""Rows of every format, and the place of the fault in everything malformed."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft_core import fault_points
from rft_core.errors import DataError, OptionsError
from rft_trainer.data.readers import json as json_rows
from rft_trainer.data.readers.files import decode_text
from rft_trainer.data.readers.formats import read_rows, resolve_files
from rft_trainer.data.readers.rows import SkipLog

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": 'a,"b"\nc', "answer": "\u00e9"}]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def fields(path: Path, **options: Any) -> list[dict[str, object]]:
    return [row.fields for row in read_rows(path, **options)]


def jsonl(rows: list[dict[str, str]], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    csv_text = 'question,answer\n1+1?,2\n"a,""b""\nc",\u00e9\n'
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.jsonl", jsonl(ROWS)),
        write(tmp_path / "a.json", json.dumps(ROWS, indent=1)),
        write(tmp_path / "b.json", json.dumps({"version": [1, {"data": 2}], "data": ROWS})),
        write(tmp_path / "a.csv", csv_text),
        tmp_path / "a.parquet",
    ]
    for file in files:
        assert fields(file) == ROWS, file


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_line_end_are_accepted(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    text = jsonl(ROWS, "\r\n") + "\r\n  \n" + json.dumps(ROWS[0])
    rows = read_rows(write(tmp_path / "a.jsonl", mark + text.encode()))
    assert [row.fields for row in rows] == [*ROWS, ROWS[0]]
    assert [row.line for row in rows] == [1, 2, 5]
    assert fields(write(tmp_path / "a.json", mark + json.dumps(ROWS).encode())) == ROWS
    assert fields(write(tmp_path / "a.csv", mark + b"question,answer\r\n1+1?,2\r\n\r\n")) == ROWS[:1]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    row = {"question": "a\u2028b\u0085c\x0bd", "answer": "1"}
    file = write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    assert fields(file) == [row]


def test_rows_of_a_json_list_and_of_csv_know_the_line_they_start_on(tmp_path: Path) -> None:
    as_json = write(tmp_path / "a.json", '[\n {"a": 1},\n {"a":\n 2},\n\n {"a": 3} ]')
    assert [row.line for row in read_rows(as_json)] == [2, 3, 6]
    as_csv = write(tmp_path / "a.csv", 'a,b\n"1\n1",2\n3,4\n')
    assert [row.line for row in read_rows(as_csv)] == [2, 4]


MALFORMED: list[tuple[str, bytes, str, str]] = [
    # file, content, code, end of `where`
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "data.not_utf8", "a.jsonl:2:8"),
    ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "data.not_utf8", "a.jsonl:1:1"),
    ("a.jsonl", b"\x1f\x8b\x08\x00junk", "data.not_utf8", "a.jsonl:1:2"),
    ("a.jsonl", b'{"a": 1}\n{"a": \x00}\n', "data.nul", "a.jsonl:2:7"),
    ("a.jsonl", b'{"a": 1}\n{"a": "cut', "data.cut", "a.jsonl:2:7"),
    ("a.jsonl", b'{"a": 1}\n{"a": ', "data.cut", "a.jsonl:2:7"),
    ("a.jsonl", b'{"a": 1}\n{"a": x}\n', "data.bad_json", "a.jsonl:2:7"),
    ("a.jsonl", b'{"a": 1} {"a": 2}\n', "data.bad_json", "a.jsonl:1:10"),
    ("a.jsonl", b'{"a": 1, "b": 2, "a": 3}\n', "data.refused_value", "a.jsonl:1:a"),
    ("a.jsonl", b'{"a": 1}\n{"a": {"b": 1, "b": 1}}\n', "data.refused_value", "a.jsonl:2:b"),
    ("a.jsonl", b'{"a": 1, "b": 2, "b": 3}\n', "data.refused_value", "a.jsonl:1:b"),
    ("a.jsonl", b'{"a": NaN}\n', "data.refused_value", "a.jsonl:1"),
    ("a.jsonl", b'{"a": -Infinity}\n', "data.refused_value", "a.jsonl:1"),
    ("a.jsonl", b'{"a": 1e999}\n', "data.refused_value", "a.jsonl:1"),
    ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", "data.bad_json", "a.jsonl:1"),
    ("a.jsonl", b'{"a": "\\ud83d"}\n', "data.surrogate", "a.jsonl:1"),
    ("a.jsonl", b'{"a": ' + b"[" * 200_000 + b"\n", "data.bad_json", "a.jsonl:1"),
    ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "data.not_an_object", "a.jsonl:2"),
    ("a.jsonl", b'{"a": 1}\n"text"\n', "data.not_an_object", "a.jsonl:2"),
    ("a.jsonl", b"", "data.empty", "a.jsonl:1"),
    ("a.jsonl", b"\n\r\n \n", "data.no_rows", "a.jsonl:1"),
    ("a.json", b"", "data.empty", "a.json:1"),
    ("a.json", b"[]", "data.no_rows", "a.json:1"),
    ("a.json", b'{"data": []}', "data.no_rows", "a.json:1"),
    ("a.json", b" [\n] \n", "data.no_rows", "a.json:1"),
    ("a.json", b'{"data": [] }', "data.no_rows", "a.json:1"),
    ("a.json", b'{"a": 1, }', "data.bad_json", "a.json:1:10"),
    ("a.json", b'{"data": [{"a": 1}], }', "data.bad_json", "a.json:1:22"),
    ("a.json", b"\n[3]", "data.not_an_object", "a.json:2"),
    ("a.json", b'{"rows": [{"a": 1}]}', "data.refused_value", "a.json:1:data"),
    ("a.json", b'{"data": {"a": 1}}', "data.refused_value", "a.json:1:data"),
    ("a.json", b"{}", "data.refused_value", "a.json:1:data"),
    ("a.json", b'[\n{"a": 1},\n{"a": 2', "data.cut", "a.json:3:8"),
    ("a.json", b'[\n{"a": 1},\n', "data.cut", "a.json:3:1"),
    ("a.json", b'[\n{"a": 1}\n{"a": 2}]', "data.bad_json", "a.json:3:1"),
    ("a.json", b'[{"a": 1}] x', "data.bad_json", "a.json:1:12"),
    ("a.json", b'{"a": 1}\n{"a": 2}\n', "data.bad_json", "a.json:2:1"),
    ("a.json", b'[\n{"a": 1},\n\n{"a": 1, "a": 2}]', "data.refused_value", "a.json:4:a"),
    ("a.json", b'[\n{"a": 1},\n3]', "data.not_an_object", "a.json:3"),
    ("a.json", b'[\n"\\ude00"]', "data.surrogate", "a.json:2"),
    ("a.json", b"[" * 200_000, "data.bad_json", "a.json:1"),
    ("a.json", b"3", "data.bad_json", "a.json:1:1"),
    ("a.json", b'[\n{"a": "\xc3"}]', "data.not_utf8", "a.json:2:8"),
    ("a.csv", b"", "data.empty", "a.csv:1"),
    ("a.csv", b"a,b\n", "data.no_rows", "a.csv:1"),
    ("a.csv", b"a,b\n1,2\n3\n", "data.unequal_row", "a.csv:3:b"),
    ("a.csv", b"a,b\n1,2,3\n", "data.unequal_row", "a.csv:2:3"),
    ("a.csv", b'a,b\n1,"cut\n', "data.cut", "a.csv:2"),
    ("a.csv", b'a,b\n1,2\n1,"x"y\n', "data.bad_csv", "a.csv:3"),
    ("a.csv", b"a,a\n1,2\n", "data.bad_header", "a.csv:1:a"),
    ("a.csv", b"a,\n1,2\n", "data.bad_header", "a.csv:1:2"),
    ("a.csv", b"a,b\n1,\xe9\n", "data.not_utf8", "a.csv:2:3"),
    ("a.csv", b"a,b\n1,\x00\n", "data.nul", "a.csv:2:3"),
    ("a.parquet", b"", "data.empty", "a.parquet:1"),
    ("a.parquet", b"PAR1 and no more", "data.damaged", "a.parquet:1"),
    ("a.jsonl.gz", b"\x1f\x8b", "data.compressed", "a.jsonl.gz"),
    ("a.csv.zip", b"PK", "data.compressed", "a.csv.zip"),
    ("a.jsnl", b"{}", "data.unknown_suffix", "a.jsnl"),
    ("a", b"{}", "data.unknown_suffix", "a"),
]


@pytest.mark.parametrize(("name", "content", "code", "where"), MALFORMED)
def test_malformed_input_is_named_by_file_line_and_field(
    tmp_path: Path, name: str, content: bytes, code: str, where: str
) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path / name, content))
    problem = caught.value.problem
    assert (problem.code, problem.where) == (code, str(tmp_path / where))
    assert problem.do
    assert problem.why
    assert len(problem.as_text()) < 2000


def test_the_byte_of_bad_utf8_is_told_from_the_start_of_the_file(tmp_path: Path) -> None:
    content = b'{"a": 1}\n{"a": "\xff"}\n'
    with pytest.raises(DataError, match=f"byte {content.index(255)} ") as caught:
        read_rows(write(tmp_path / "a.jsonl", content))
    assert caught.value.problem.code == "data.not_utf8"


def test_a_line_that_is_too_long_is_refused_without_reading_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json_rows.MAX_LINE_BYTES == 64 * 2**20
    monkeypatch.setattr(json_rows, "MAX_LINE_BYTES", 100)
    longest = b'{"a": "' + b"x" * 90 + b'"}\n'
    assert (len(longest), len(fields(write(tmp_path / "b.jsonl", longest)))) == (100, 1)
    with pytest.raises(DataError) as caught:
        read_rows(write(tmp_path / "b.jsonl", b" " + longest))
    assert caught.value.problem.code == "data.line_too_long"
    file = write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "' + b"x" * 200 + b'"}\n')
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert (caught.value.problem.code, caught.value.problem.where) == ("data.line_too_long", f"{file}:2")


def test_skips_pass_over_bad_rows_up_to_the_limit_and_name_them(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"a": 1}\nbad\n{"a": 2}\n[]\n{"a": 3}\n')
    skips = SkipLog(limit=2)
    assert [row.fields["a"] for row in read_rows(file, skips=skips)] == [1, 2, 3]
    assert [error.problem.where for error in skips.problems] == [f"{file}:2:1", f"{file}:4"]
    with pytest.raises(DataError) as caught:
        read_rows(file, skips=SkipLog(limit=1))
    assert caught.value.problem.where == f"{file}:4"


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", jsonl(ROWS))

    def grow(point: str) -> None:
        if point == "data.read_end":
            file.write_text(jsonl(ROWS * 2))

    fault_points.install(grow)
    try:
        with pytest.raises(DataError) as caught:
            read_rows(file)
    finally:
        fault_points.install(None)
    assert caught.value.problem.code == "data.changed"


def test_what_the_operating_system_refuses_is_named(tmp_path: Path) -> None:
    def fail(point: str) -> None:
        raise OSError(5, os.strerror(5))

    file = write(tmp_path / "a.jsonl", jsonl(ROWS))
    fault_points.install(fail)
    try:
        with pytest.raises(DataError, match="EIO") as caught:
            read_rows(file)
        assert caught.value.problem.code == "data.unreadable"
    finally:
        fault_points.install(None)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path: Path, suffix: str) -> None:
    pipe, device, folder = (tmp_path / f"{name}{suffix}" for name in ("pipe", "device", "folder"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        (tmp_path / "s").mkdir()
        listener.bind(str(tmp_path / "s" / f"a{suffix}"))
    for special in (pipe, device, tmp_path / "s" / f"a{suffix}"):
        with pytest.raises(DataError) as caught:
            read_rows(special)
        assert caught.value.problem.code == "data.not_a_file"
        assert caught.value.problem.where == str(special)
    folder.mkdir()
    with pytest.raises(DataError) as caught:
        read_rows(folder)
    assert caught.value.problem.code == "data.no_files"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_give_rows_or_a_data_error_and_nothing_else(
    tmp_path: Path, suffix: str, cut: int, flip: int, byte: int
) -> None:
    source = tmp_path / f"whole{suffix}"
    if not source.exists():
        rows = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), source)
        elif suffix == ".csv":
            write(source, "question,answer\n" + "".join(f'"{i}?",{i}\n' for i in range(20)))
        else:
            write(source, jsonl(rows) if suffix == ".jsonl" else json.dumps(rows))
    content = bytearray(source.read_bytes())
    if suffix != ".parquet":  # a flipped length inside a parquet page is its reader's own matter
        content[flip % len(content)] = byte
    file = write(tmp_path / f"damaged{suffix}", bytes(content[: cut % (len(content) + 1)]))
    try:
        places = [row.where() for row in read_rows(file)]
    except DataError as error:
        places = [error.problem.where]
    assert places
    assert all(place.startswith(f"{file}:") for place in places)


def test_parquet_text_that_is_not_utf8_is_named_by_row_and_column(tmp_path: Path) -> None:
    bad = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"n": [1, 2], "answer": bad}), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "a.parquet")
    assert caught.value.problem.where == f"{tmp_path / 'a.parquet'}:2:answer"


def save_as_datasets_does(directory: Path, *shards: list[dict[str, str]]) -> None:
    """The files of `Dataset.save_to_disk`: arrow streams named in state.json."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    write(directory / "state.json", json.dumps(state))
    write(directory / "dataset_info.json", "{}")


def test_a_saved_dataset_is_read_by_split_without_the_datasets_package(tmp_path: Path) -> None:
    save_as_datasets_does(tmp_path / "d" / "train", ROWS * 2, ROWS)
    save_as_datasets_does(tmp_path / "d" / "test", ROWS[:1])
    write(tmp_path / "d" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    save_as_datasets_does(tmp_path / "one", ROWS)
    assert fields(tmp_path / "d", split="train") == ROWS * 3
    assert fields(tmp_path / "d", split="test") == ROWS[:1]
    assert [row.line for row in read_rows(tmp_path / "d", split="train")] == [1, 2, 3, 4, 5, 6]
    assert fields(tmp_path / "one") == ROWS
    with pytest.raises(OptionsError, match="train, test") as caught:
        read_rows(tmp_path / "d")
    assert caught.value.problem.code == "data.split"
    (tmp_path / "d" / "train" / "state.json").write_text('{"_data_files": [{"filename": "../../x.arrow"}]}')
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "d", split="train")
    assert caught.value.problem.code == "data.bad_saved_dataset"


def test_a_directory_of_files_is_read_by_split(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    write(tmp_path / "README.md", "text")
    assert fields(tmp_path, split="train") == ROWS * 2
    assert [file.name for file in resolve_files(tmp_path, split="test")] == ["test-00000-of-00001.parquet"]
    with pytest.raises(OptionsError, match="test, train") as caught:
        read_rows(tmp_path)
    assert caught.value.problem.code == "data.split"
    with pytest.raises(OptionsError, match="'valid'") as caught:
        read_rows(tmp_path, split="valid")
    assert caught.value.problem.code == "data.split"


def test_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        write(tmp_path / f"part{number}.jsonl", json.dumps({"n": number}))
    assert fields(tmp_path / "part*.jsonl") == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_what_is_not_there_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", jsonl(ROWS))
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "trian.jsonl")
    assert caught.value.problem.do == f"--prompt_data {tmp_path / 'train.jsonl'}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "empty")
    assert caught.value.problem.code == "data.no_files"
    with pytest.raises(DataError) as caught:
        read_rows("openai/gsm8k")
    assert caught.value.problem.do.startswith("hf download --repo-type dataset openai/gsm8k")


@pytest.mark.parametrize(
    ("content", "why", "do"),
    [
        (b"\xff\xfea\0", "the file starts as UTF-16 does", "iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff\0a", "the file starts as UTF-16 does", "iconv -f UTF-16 -t UTF-8"),
        (gzip.compress(b"a"), "the file starts as gzip does", "gunzip -c"),
        (b"a\xe9", "text must be UTF-8", "iconv -f LATIN1 -t UTF-8"),
    ],
    ids=["UTF-16, low byte first", "UTF-16, high byte first", "gzip", "Latin-1"],
)
def test_the_beginning_of_a_file_tells_its_encoding_and_the_way_to_convert_it(
    content: bytes, why: str, do: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        decode_text(content, tmp_path / "rows.jsonl")
    problem = caught.value.problem
    assert problem.code == "data.not_utf8"
    assert problem.why.startswith(why)
    assert problem.do.startswith(do)


def test_a_file_of_tabs_is_read(tmp_path: Path) -> None:
    assert fields(write(tmp_path / "a.tsv", "question\tanswer\n1,5?\t2\n")) == [{"question": "1,5?", "answer": "2"}]


@pytest.mark.parametrize(
    ("wanted", "do"), [("trian.jsonl", "--prompt_data {}/train.jsonl"), ("teh_data.jsonl", "ls {}")]
)
def test_only_a_file_of_a_like_name_is_taken_for_one_that_is_not_there(tmp_path: Path, wanted: str, do: str) -> None:
    for name in ("train.jsonl", "test.jsonl", "train.py"):
        write(tmp_path / name, "{}")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / wanted)
    assert caught.value.problem.do == do.format(tmp_path)
