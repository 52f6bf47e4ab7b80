"""Rows of data files with their locations, and the policy for unusable rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rft_core.errors import DataError

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a data file.

    `line` is the 1-based line on which the record starts; in a parquet or arrow file, which has
    no lines, it is the 1-based number of the record.
    """

    fields: dict[str, Any]
    file: str
    line: int

    def where(self, key: str = "") -> str:
        """Return `file:line` or `file:line:field`, the form that every data error uses."""
        return f"{self.file}:{self.line}:{key}" if key else f"{self.file}:{self.line}"


@dataclass(slots=True)
class SkipLog:
    """Log of skipped rows, with a limit on their number.

    With the default limit of 0 the first bad row stops the run. Each skipped row leaves its
    problem in `problems`, so that what is missing from training can be listed.
    """

    limit: int = 0
    problems: list[DataError] = field(default_factory=list)

    def take(self, error: DataError) -> None:
        """Log the row of `error` as skipped, or raise the error when the limit is reached."""
        if len(self.problems) >= self.limit:
            raise error
        self.problems.append(error)


def wrong_type(row: Row, key: str, what: str, why: str, *, do: str = "") -> DataError:
    """Return the error that a field holds something else than its use needs."""
    where = row.where(key)
    return DataError(code="data.wrong_type", what=what, where=where, why=why, do=do or f"correct {where}")


def refused_value(what: str, *, where: str, why: str, do: str) -> DataError:
    """Return the error of a value that a library reads, and whose meaning is undefined or of no use."""
    return DataError(code="data.refused_value", what=what, where=where, why=why, do=do)


def shown(value: object) -> str:
    """Format a value for a message: its Python form, cut to 80 characters."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
