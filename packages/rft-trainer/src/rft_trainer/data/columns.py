"""Columns that a row lacks: how many rows lack them, and which other column may have been meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rft_core.errors import DataError
from rft_core.nearest_names import nearest_names
from rft_trainer.data.readers.rows import Row, shown

_MEANINGS: dict[str, tuple[str, ...]] = {
    "--input_key": ("prompt", "question", "problem", "query", "instruction", "input", "inputs", "messages"),
    "--label_key": (
        "answer",
        "label",
        "labels",
        "ground_truth",
        "target",
        "solution",
        "expected",
        "reference",
        "reward_model.ground_truth",
    ),
    "--output_key": ("response", "completion", "output", "answer", "chosen", "target", "solution"),
}
"""Names that columns of this use have in public data, the most telling first."""


class MissingColumnError(DataError):
    """A row without a column that a setting names."""

    flag = ""
    """The setting, such as --label_key."""
    in_no_row = False
    """Whether no row of the source has the column."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of one source that are in use, by the settings that name them."""

    rows: Sequence[Row]
    used: Mapping[str, str]
    """Setting -> column; a column that one setting names is not proposed for another."""

    def field(self, row: Row, key: str, flag: str) -> Any:
        """Return the value of a column, which may be dotted, or raise `MissingColumnError`."""
        if key in row.fields:
            return row.fields[key]
        found, value = _lookup(row.fields, key)
        if not found:
            raise self._missing(row, key, flag)
        return value

    def _missing(self, row: Row, key: str, flag: str) -> MissingColumnError:
        lacking = [other for other in self.rows if not _lookup(other.fields, key)[0]]
        in_no_row = len(lacking) == len(self.rows)
        counted = "" if in_no_row else f"; {len(lacking)} of {len(self.rows)} rows lack it"
        # a single row says nothing about which of the two is the mistake
        meant = self._meant(row, key, flag) if in_no_row else ""
        do = f"{flag} {meant}" if meant else f"{flag} with the field that holds it, or give the rows the field {key}"
        if not in_no_row:
            do = f"give {row.where()} the field {key}, or remove it"
        error = MissingColumnError(
            code="data.missing_field",
            what=f"no field {shown(key)}; the row has {', '.join(row.fields)}{counted}",
            where=row.where(key),
            why=f"every row must have the field that {flag} names",
            do=do,
        )
        error.flag, error.in_no_row = flag, in_no_row
        return error

    def _meant(self, row: Row, key: str, flag: str) -> str:
        """The column that `key` stands for, where one alone can be meant; else ""."""
        taken = {column for setting, column in self.used.items() if setting != flag}
        free = [name for name in _names(row.fields, with_lists=flag == "--input_key") if name not in taken]
        near = nearest_names(key, free, count=1)
        if near:
            return near[0]
        # a prompt that is sought under a wrong name may be called as a label usually is: only its own names count
        known = [name for name in _MEANINGS.get(flag, ()) if name in free]
        return known[0] if known else ""


def has_column(fields: Mapping[str, Any], key: str) -> bool:
    """Return whether a row has a column, whose key may be dotted."""
    return _lookup(fields, key)[0]


def _names(fields: Mapping[str, Any], *, with_lists: bool) -> Iterator[str]:
    """Names of the columns whose values can be a text; those of nested objects are dotted."""
    kinds = (str, int, float, Decimal, list, tuple) if with_lists else (str, int, float, Decimal)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner, item in value.items() if _is(item, kinds))
        elif _is(value, kinds):
            yield name


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _lookup(fields: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """(whether it is there, value) of a key, which may reach into nested objects unless the plain key exists."""
    if key in fields:
        return True, fields[key]
    value: Any = fields
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value
