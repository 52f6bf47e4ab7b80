"""Rows that a program holds as a file that a run reads: lists of dicts, a `datasets.Dataset`, a pandas frame.

A run is a directory that can be continued by anybody, so its rows have to stand in a file. They are written once into
the cache of the user, `RFT_CACHE` or `~/.cache/rft`, under the hash of their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from rft.process.cache import cache_directory
from rft_core.durable_files import replace_bytes, storage_errors
from rft_core.errors import DataError, OptionsError

Rows: TypeAlias = Sequence[Mapping[str, Any]] | Any
"""Rows as objects: dicts, a `datasets.Dataset`, a pandas frame."""


def rows_directory() -> Path:
    """Return the directory of the files that rows are written to."""
    return cache_directory() / "rows"


def rows_file(data: Rows, name: str) -> str:
    """Return the path, or the name, by which a run reads `data`; rows given as objects are written to a file.

    Args:
        data: a path, a name on the Hub or several joined by commas; or rows.
        name: of the argument, for errors.

    Raises:
        OptionsError: objects that are no rows; no rows.
        DataError: a value that JSON does not have, with its row and column.
    """
    if isinstance(data, str | Path):
        return str(data)
    text = "".join(_lines(_records(data, name), name)).encode()
    path = rows_directory() / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    # its name is the hash of its content: one that is there is the same
    if not path.is_file():
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, text)
    return str(path)


def _records(data: Any, name: str) -> Iterable[Any]:
    if isinstance(data, Mapping):
        keys = [str(key) for key in cast("Mapping[Any, Any]", data)]
        raise _no_rows(
            name, f"a mapping with {', '.join(keys[:5])}", f"{name}=DATA[{keys[0]!r}]" if keys else f"{name}=ROWS"
        )
    # a pandas frame, which iterates over the names of its columns
    as_records = getattr(data, "to_dict", None) if getattr(data, "columns", None) is not None else None
    if as_records is not None:
        return as_records("records")
    if not isinstance(data, Iterable):
        raise _no_rows(name, f"of type {type(data).__name__}", f'{name}=[{{"input": "2+3=", "label": "5"}}]')
    return cast("Iterable[Any]", data)


def _lines(records: Iterable[Any], name: str) -> Iterable[str]:
    number = 0
    for number, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            what = f"row {number} of type {type(record).__name__}"
            raise _no_rows(name, what, f'{name}=[{{"input": "2+3=", "label": "5"}}]')
        row = cast("Mapping[str, Any]", record)
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise _not_json(row, number, name, error) from error
    if not number:
        raise _no_rows(name, "empty", f'{name}=[{{"input": "2+3=", "label": "5"}}]')


def _not_json(row: Mapping[str, Any], number: int, name: str, error: Exception) -> DataError:
    column = next((key for key, value in row.items() if not _is_json(value)), "")
    return DataError(
        code="library.row_value",
        what=f"row {number} of {name}, column {column!r}: {error}",
        where=f"{name}[{number - 1}][{column!r}]",
        why="rows are written as JSON, so that the run can be continued: texts, finite numbers, true, false, null, "
        "lists and dicts of these",
        state="nothing was started",
        do=f"str(...) around the values of column {column!r}",
    )


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _no_rows(name: str, what: str, do: str) -> OptionsError:
    return OptionsError(
        code="library.no_rows",
        what=f"{name} is {what}",
        where=f"argument {name}",
        why="rows are a list of dicts, a datasets.Dataset or a pandas frame; else a path or a name on the Hub",
        state="nothing was started",
        do=do,
    )
