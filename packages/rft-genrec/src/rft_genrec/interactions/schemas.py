"""Declared columns of data files, and rows that are read by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rft_core.errors import DataError
from rft_genrec.catalogue.file_errors import refused_cell, refused_file

LATEST_TIME = 4_102_444_800
"""Seconds since 1970 of the year 2100: what is later was counted in other units."""
Kind = Literal["name", "text", "texts", "time"]
_EXPECTED = {
    "name": "text that is not empty, or a whole number",
    "text": "text",
    "texts": "text, or a list of texts",
    "time": "seconds from 1970 to 2100, or a date such as 2018-03-01T12:00",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a file.

    Example: `Column("asin", "name", "the item")` holds a name in every row.
    """

    name: str
    kind: Kind
    """name = text without tabs and ends of lines, or a whole number; texts = a text, or a list of texts and lists;
    time = seconds since 1970."""
    meaning: str
    required: bool = True
    """Whether every row must have a value; where it need not, an absent one is read as empty."""


@dataclass(slots=True)
class RowPolicy:
    """What becomes of rows that are not as they are declared."""

    skips: bool = False
    """Whether they are left out and counted; otherwise the first one ends the reading."""
    checked: int = 0
    refused: int = 0
    first: DataError | None = None
    """The first that was left out."""

    def refuse(self, error: DataError) -> None:
        """Count a row that is left out.

        Raises:
            DataError: rows are not left out.
        """
        if not self.skips:
            raise error
        self.refused += 1
        self.first = self.first or error


@dataclass(frozen=True, slots=True)
class RowReader:
    """Values of rows in the order of declared columns."""

    path: Path
    columns: Sequence[Column]
    policy: RowPolicy = field(default_factory=RowPolicy)

    def read(self, rows: Iterable[tuple[int, Mapping[str, Any] | DataError]]) -> Iterator[tuple[Any, ...]]:
        """Yield the values of every row; those of a row that is no row are errors, which the policy judges."""
        for number, row in rows:
            self.policy.checked += 1
            try:
                if isinstance(row, DataError):
                    raise row
                values = tuple(self._value(number, place, column, row) for place, column in enumerate(self.columns))
            except DataError as error:
                self.policy.refuse(error)
                continue
            yield values

    def check_heading(self, heading: Sequence[str]) -> None:
        """Refuse a heading that lacks a required column, or has one twice."""
        missing = [column.name for column in self.columns if column.required and column.name not in heading]
        twice = [column.name for column in self.columns if heading.count(column.name) > 1]
        if missing or twice:
            what = f"column {missing[0]} is missing" if missing else f"column {twice[0]} is there twice"
            why = f"needed: {', '.join(column.name for column in self.columns if column.required)}"
            raise refused_file(self.path, f"row 1: {what}", f"{why}; found: {', '.join(heading)[:200]}")

    def _value(self, number: int, place: int, column: Column, row: Mapping[str, Any]) -> Any:
        found = row.get(column.name)
        if found is None and not column.required:
            return [] if column.kind == "texts" else ""
        value = _CONVERSIONS[column.kind](found)
        if value is None:
            expected = _EXPECTED[column.kind]
            raise refused_cell(self.path, number, (place + 1, column.name), f"{expected} ({column.meaning})", found)
        return value


def _name(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.isprintable():
        return None
    return value.strip() or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and "\0" not in value else None


def _texts(value: Any) -> list[str] | None:
    """Return a text, a list of texts, or a list of lists of them as one list."""
    if isinstance(value, str):
        return [value] if "\0" not in value else None
    if not isinstance(value, list):
        return None
    texts: list[str] = []
    for part in value:
        inner = part if isinstance(part, list) else [part]
        if not all(_text(text) is not None for text in inner):
            return None
        texts += inner
    return texts


def _time(value: Any) -> int | None:
    if isinstance(value, str):
        value = _time_of_text(value.strip())
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_time = math.isfinite(value) and 0 <= value <= LATEST_TIME
    return int(value) if is_time else None


def _time_of_text(text: str) -> float | datetime | None:
    """Return seconds or the date that a text writes; None for anything else."""
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text) if "." in text else float(int(text)) if len(text) <= len(str(LATEST_TIME)) else None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


_CONVERSIONS = {"name": _name, "text": _text, "texts": _texts, "time": _time}
