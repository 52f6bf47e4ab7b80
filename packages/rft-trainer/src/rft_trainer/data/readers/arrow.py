"""Readers of parquet files and of directories written by `datasets`' `save_to_disk`, through pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.readers.files import no_rows, no_such_split, not_utf8, open_data_file, unreadable
from rft_trainer.data.readers.rows import Row, refused_value, shown

_RECORDS = 4096
"""Records that are Python objects at a time."""
_ODD_VALUES = (ArithmeticError, LookupError, TypeError, ValueError)
"""What a value that Python has no object for raises: a date of the year 300,000, a time zone that nobody knows."""


def read_parquet(file: Path) -> list[Row]:
    """Read all records; `Row.line` is the record's number from 1."""
    rows = list(iter_parquet(file))
    if not rows:
        raise no_rows(file)
    return rows


def iter_parquet(file: Path, *, after_line: int = 0) -> Iterator[Row]:
    """Read as `read_parquet` does, one row at a time; the first `after_line` records are passed over."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_data_file(file):
        pass  # refuses what is empty or unreadable by its own name before pyarrow does
    try:
        with pq.ParquetFile(file) as table:
            # before any row: `to_pylist` makes dictionaries, which hold a name once
            _refuse_double_columns(table.schema_arrow.names, file)
            done, groups = _groups_behind(table, after_line)
            for batch in table.iter_batches(_RECORDS, row_groups=groups):
                start, done = max(after_line - done, 0), done + batch.num_rows
                if start < batch.num_rows:
                    rows: list[Row] = []
                    _append_batches(rows, [batch.slice(start)], file, first=done - batch.num_rows + start + 1)
                    yield from rows
    except (pa.ArrowException, OSError, *_ODD_VALUES) as error:
        raise _damaged(error, file, "parquet") from error


def count_parquet(file: Path) -> int:
    """Return the number of records of a parquet file.

    Raises:
        DataError: it is none, or cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_data_file(file):
        pass
    try:
        with pq.ParquetFile(file) as table:
            return int(table.metadata.num_rows)
    except (pa.ArrowException, OSError, *_ODD_VALUES) as error:
        raise _damaged(error, file, "parquet") from error


def _groups_behind(table: Any, after_line: int) -> tuple[int, list[int]]:
    """Return the records of the row groups that are passed over whole, and the numbers of the others."""
    done = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        if done + size > after_line:
            return done, list(range(group, table.num_row_groups))
        done += size
    return done, []


def read_arrow(file: Path) -> list[Row]:
    """Read all records of one file that `datasets` wrote, a stream of Arrow."""
    rows = _read_stream(file, first=1)
    if not rows:
        raise no_rows(file)
    return rows


def is_saved_dataset(directory: Path) -> bool:
    """Return whether `save_to_disk` wrote this directory."""
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()


def read_saved_dataset(directory: Path, *, split: str | None) -> list[Row]:
    """Read all records of a saved `Dataset`, or of the named split of a saved `DatasetDict`."""
    if (directory / "dataset_dict.json").is_file():
        directory = directory / _chosen_split(directory, split)
    rows: list[Row] = []
    # in the order of state.json, not of the folder: it is the order of the rows
    for file in _data_files(directory):
        rows.extend(_read_stream(file, first=len(rows) + 1))
    if not rows:
        raise no_rows(directory)
    return rows


def _chosen_split(directory: Path, split: str | None) -> str:
    splits = _json_object(directory / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise _bad_layout(directory / "dataset_dict.json", 'no list under "splits"')
    if split in splits:
        return str(split)
    raise no_such_split(directory, split, splits, "a saved DatasetDict is read one split at a time")


def _data_files(directory: Path) -> list[Path]:
    state_file = directory / "state.json"
    state = _json_object(state_file)
    # read as they are, all rows would be taken where some were chosen
    if state.get("_indices_data_files"):
        raise _bad_layout(state_file, "rows are selected by an indices file, a form of datasets before 2.0")
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries or [] if isinstance(entry, dict)]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise _bad_layout(state_file, f"no plain file names under _data_files: {shown(entries)}")
    return [directory / str(name) for name in names]


def _read_stream(file: Path, *, first: int) -> list[Row]:
    import pyarrow as pa

    rows: list[Row] = []
    with open_data_file(file):
        pass
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as reader:
            _refuse_double_columns(reader.schema.names, file)
            _append_batches(rows, reader, file, first=first)
    except (pa.ArrowException, OSError, *_ODD_VALUES) as error:
        raise _damaged(error, file, "arrow") from error
    return rows


def _append_batches(rows: list[Row], batches: Iterable[Any], file: Path, *, first: int = 1) -> None:
    for batch in batches:
        start = first + len(rows)
        _refuse_bad_offsets(batch)
        try:
            records = batch.to_pylist()
        except UnicodeDecodeError as error:
            raise _bad_text(batch, file, start) from error
        rows.extend(Row(fields, str(file), start + number) for number, fields in enumerate(records))


def _refuse_bad_offsets(batch: Any) -> None:
    """Raise `ArrowInvalid` for values outside of their buffers, which would be read from anywhere in memory."""
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            # of texts that are no UTF-8 the row is found later, and named
            if "UTF8" not in str(error):
                raise


def _bad_text(batch: Any, file: Path, start: int) -> DataError:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        # value by value only now: the batch that failed does not say which row it was
        for number, scalar in enumerate(column):
            try:
                scalar.as_py()
            except UnicodeDecodeError as error:
                where, do = f"{file}:{start + number}:{name}", f"write column {name} of {file} again as UTF-8"
                return not_utf8(error, "the value", where=where, do=do)
    raise AssertionError("a batch that could not be decoded decodes value by value")


def _refuse_double_columns(names: list[str], file: Path) -> None:
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            raise refused_value(
                f"column {shown(name)} occurs twice",
                where=f"{file}:1:{name}",
                why="which of the two values counts is undefined",
                do=f"give every column of {file} its own name",
            )
        earlier.add(name)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise _bad_layout(file, str(error)) from error
    if not isinstance(value, dict):
        raise _bad_layout(file, f"not an object: {shown(value)}")
    return value


def _bad_layout(file: Path, what: str) -> DataError:
    return DataError(
        code="data.bad_saved_dataset",
        what=f"{file}: {what}",
        where=f"{file}:1",
        why="the directory is not what save_to_disk of a current datasets version writes",
        do=f"save the data set again with save_to_disk to {file.parent}",
    )


def _damaged(error: Exception, file: Path, kind: str) -> DataError:
    return DataError(
        code="data.damaged",
        what=f"{file} is not a readable {kind} file: {shown(str(error))}",
        where=f"{file}:1",
        why=f"a {kind} file must be complete and undamaged",
        do=f"copy {file} again from its source",
    )
