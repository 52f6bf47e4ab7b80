"""A row of a data file and the place it came from, and the policy for rows that cannot be used."""

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
        """`file:line` or `file:line:field`, the form that every data error uses."""
        return f"{self.file}:{self.line}:{key}" if key else f"{self.file}:{self.line}"


@dataclass(slots=True)
class SkipLog:
    """How many unusable rows a run passes over, and which ones it did.

    With the default limit of 0 the first bad row stops the run. Each skipped row leaves its
    problem in `problems`, so that what is missing from training can be listed.
    """

    limit: int = 0
    problems: list[DataError] = field(default_factory=list)

    def take(self, error: DataError) -> None:
        """Note the row behind `error`, or raise it when the limit is reached."""
        if len(self.problems) >= self.limit:
            raise error
        self.problems.append(error)

    def lines(self) -> list[str]:
        """One line a skipped row: place and reason."""
        return [f"skipped {error.problem.where}: {error.problem.what}" for error in self.problems]


def shown(value: object) -> str:
    """A value as it appears in a message: its Python form, cut to 80 characters."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
