"""Parquet files and saved data sets: numbers of records, and what is refused in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.readers.arrow import is_saved_dataset, read_parquet, read_saved_dataset


def bad_text(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def stream(file: Path, *tables: pa.Table) -> None:
    """An arrow stream of one batch a table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def state(folder: Path, *names: object, **others: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **others}))


def refused(read: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """(code, place without the folder) of the problem."""
    with pytest.raises((DataError, OptionsError)) as caught:
        read(*arguments, **options)
    problem = caught.value.problem
    return problem.code, problem.where.removeprefix(f"{arguments[0].parent}/")


def test_records_of_parquet_are_numbered_over_all_batches(tmp_path: Path) -> None:
    numbers = list(range(66_000))
    pq.write_table(pa.table({"n": numbers}), tmp_path / "a.parquet")
    rows = read_parquet(tmp_path / "a.parquet")
    assert [row.line for row in rows] == [number + 1 for number in numbers]
    assert [row.fields["n"] for row in rows] == numbers
    assert {row.file for row in rows} == {str(tmp_path / "a.parquet")}


def test_records_of_a_saved_dataset_are_numbered_over_files_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    stream(folder / "b.arrow", pa.table({"n": [1, 2]}), pa.table({"n": [3]}))
    stream(folder / "a.arrow", pa.table({"n": [4, 5]}))
    stream(folder / "c.arrow", pa.table({"n": [9]}))
    state(folder, "b.arrow", "a.arrow")
    rows = read_saved_dataset(folder, split=None)
    assert [(row.fields["n"], row.line) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert [Path(row.file).name for row in rows] == ["b.arrow"] * 3 + ["a.arrow"] * 2


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "b"])
    pq.write_table(twice, tmp_path / "a.parquet")
    assert refused(read_parquet, tmp_path / "a.parquet") == ("data.refused_value", "a.parquet:1:b")
    stream(tmp_path / "d" / "x.arrow", twice)
    state(tmp_path / "d", "x.arrow")
    assert refused(read_saved_dataset, tmp_path / "d", split=None) == ("data.refused_value", "d/x.arrow:1:b")


def test_text_that_is_not_utf8_is_named_by_its_record_in_the_data_set(tmp_path: Path) -> None:
    good, bad = bad_text(b"x", b"y"), bad_text(b"z", b"\xff")
    stream(tmp_path / "d" / "a.arrow", pa.table({"t": good}))
    stream(tmp_path / "d" / "b.arrow", pa.table({"n": [1, 2], "t": good}), pa.table({"n": [3, 4], "t": bad}))
    state(tmp_path / "d", "a.arrow", "b.arrow")
    assert refused(read_saved_dataset, tmp_path / "d", split=None) == ("data.not_utf8", "d/b.arrow:6:t")


def test_what_holds_no_records_or_is_damaged_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert refused(read_parquet, tmp_path / "a.parquet") == ("data.no_rows", "a.parquet:1")
    folder = tmp_path / "d"
    stream(folder / "x.arrow", pa.table({"n": pa.array([], pa.int64())}))
    state(folder, "x.arrow")
    assert refused(read_saved_dataset, folder, split=None) == ("data.no_rows", "d:1")
    (folder / "x.arrow").write_bytes(b"no stream")
    assert refused(read_saved_dataset, folder, split=None) == ("data.damaged", "d/x.arrow:1")
    (folder / "x.arrow").write_bytes(b"")
    assert refused(read_saved_dataset, folder, split=None) == ("data.empty", "d/x.arrow:1")
    (folder / "x.arrow").unlink()
    assert refused(read_saved_dataset, folder, split=None) == ("data.unreadable", "d/x.arrow")


STATES: list[str] = [
    "[]",
    "no json",
    "{}",
    '{"_data_files": []}',
    '{"_data_files": ["x.arrow"]}',
    '{"_data_files": [{"filename": 3}]}',
    '{"_data_files": [{"filename": "x.arrow"}, {"filename": "/x.arrow"}]}',
    '{"_data_files": [{"filename": "x.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}',
]


@pytest.mark.parametrize("text", STATES)
def test_a_state_that_names_no_plain_files_or_chooses_rows_is_refused(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "d"
    stream(folder / "x.arrow", pa.table({"n": [1]}))
    (folder / "state.json").write_text(text)
    assert refused(read_saved_dataset, folder, split=None) == ("data.bad_saved_dataset", "d/state.json:1")


def test_a_saved_dataset_is_known_by_either_of_its_files(tmp_path: Path) -> None:
    assert not is_saved_dataset(tmp_path)
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).mkdir()
        assert not is_saved_dataset(tmp_path)
        (tmp_path / name).rmdir()
        (tmp_path / name).write_text("{}")
        assert is_saved_dataset(tmp_path)
        (tmp_path / name).unlink()


def test_splits_are_those_that_the_data_set_lists(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for split, number in (("train", 1), ("test", 2)):
        stream(folder / split / "x.arrow", pa.table({"n": [number]}))
        state(folder / split, "x.arrow")
    listed = folder / "dataset_dict.json"
    listed.write_text('{"splits": ["train"]}')
    assert [row.fields for row in read_saved_dataset(folder, split="train")] == [{"n": 1}]
    assert refused(read_saved_dataset, folder, split="test") == ("data.split", "--prompt_split")
    assert refused(read_saved_dataset, folder, split=None) == ("data.split", "--prompt_split")
    for text in ("{}", '{"splits": []}', '{"splits": "train"}'):
        listed.write_text(text)
        assert refused(read_saved_dataset, folder, split="train")[0] == "data.bad_saved_dataset"
