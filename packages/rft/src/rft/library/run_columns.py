"""Rows of a run as columns: a list a name, all of one length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names

_SHOWN = 8
"""Names that an error lists where none is near."""


class RunColumns(Mapping[str, "list[Any]"]):
    """Rows by column: `columns["reward/mean"]` has one value a row, None where a row lacks it.

    Example::

        columns = RunColumns([{"step": 1, "loss": 2.5}, {"step": 2}])
        columns["loss"]                             # [2.5, None]
        columns.pairs("step", "loss")               # [(1, 2.5)]
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], where: str = "") -> None:
        """`where` is what the rows are of, for messages."""
        self._rows, self._where = rows, where
        self._names = list(dict.fromkeys(name for row in rows for name in row))

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._names:
            raise UnknownColumn(self._where, name, self._names)
        return [row.get(name) for row in self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def num_rows(self) -> int:
        """Length of every column."""
        return len(self._rows)

    def pairs(self, first: str, second: str) -> list[tuple[Any, Any]]:
        """Return the values of two columns, of the rows that have both."""
        both = zip(self[first], self[second], strict=True)
        return [(a, b) for a, b in both if a is not None and b is not None]

    def __repr__(self) -> str:
        return f"Columns of {self.num_rows} rows: {', '.join(self._names) or 'none'}"


class UnknownColumn(OptionsError, KeyError):
    """No row has a column of this name. A KeyError too, as of any mapping."""

    def __init__(self, where: str, name: object, names: Sequence[str]) -> None:
        # of several figures of one quantity the mean is what is meant
        near = sorted(nearest_names(str(name), names), key=lambda near: not near.endswith("/mean"))
        near = [f"{name}/mean"] if f"{name}/mean" in names else near
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        super().__init__(
            code="run.no_column",
            what=f"no row has a column {name!r}",
            where=where,
            why=f"the nearest are {', '.join(near)}" if near else f"there are {listed}" if names else "there is no row",
            state="nothing was changed",
            do=f"[{near[0]!r}]" if near else "",
        )

    def __str__(self) -> str:
        return OptionsError.__str__(self)  # not the quoted one of KeyError
