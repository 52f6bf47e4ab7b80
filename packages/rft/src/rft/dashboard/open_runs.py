"""The numbers of the runs that are looked at: read once, and from then on as far as they grow."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.dashboard.growing_rows import GrowingRows
from rft.dashboard.metric_table import MetricTable

MOST_OPEN = 16
"""Runs whose numbers are kept; the one that was not asked for longest is read anew when it is."""
_MOST_LOOKS = 4
"""For one answer: a page is told that more is there, and asks again."""
TABLES = {"training": "metrics.jsonl", "evaluations": "evals.jsonl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPoints:
    """Points of a table that a page has already."""

    generation: int = -1
    rows_a_point: int = 0
    complete: int = 0


class _Table:
    def __init__(self, file: Path) -> None:
        self.reader, self.numbers = GrowingRows(file), MetricTable()

    def look(self) -> None:
        for _ in range(_MOST_LOOKS):
            before = self.reader.generation
            rows = self.reader.new_rows()
            if self.reader.generation != before:
                self.numbers.clear()
            self.numbers.add(rows)
            if not self.reader.is_behind:
                break


class OpenRuns:
    """Tables of the runs that pages ask for."""

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._tables: OrderedDict[Path, dict[str, _Table]] = OrderedDict()
        self._most = most
        self._lock = threading.Lock()

    def curves(self, run: Path, names: Sequence[str], known: Mapping[str, KnownPoints]) -> dict[str, Any]:
        """Return the points of some metrics that are new to a page.

        Args:
            run: directory.
            names: of metrics and evaluations.
            known: what the page has of each of `TABLES`; nothing where it is missing.
        """
        with self._lock:
            tables = self._looked_at(run)
            return {kind: _answer(table, names, known.get(kind, KnownPoints())) for kind, table in tables.items()}

    def names(self, run: Path) -> list[str]:
        """Return the names of all numbers of a run."""
        with self._lock:
            return list(dict.fromkeys(name for table in self._looked_at(run).values() for name in table.numbers.names))

    def _looked_at(self, run: Path) -> dict[str, _Table]:
        tables = self._tables.setdefault(run, {kind: _Table(run / file) for kind, file in TABLES.items()})
        self._tables.move_to_end(run)
        while len(self._tables) > self._most:
            self._tables.popitem(last=False)
        for table in tables.values():
            table.look()
        return tables


def _answer(table: _Table, names: Sequence[str], known: KnownPoints) -> dict[str, Any]:
    generation = table.reader.generation
    has_these = known.generation == generation
    points = table.numbers.thinned(
        names,
        rows_a_point=known.rows_a_point if has_these else 0,
        start=known.complete if has_these else 0,
    )
    return {
        "generation": generation,
        "is_behind": table.reader.is_behind,
        "rows": table.numbers.num_rows,
        "names": table.numbers.names,
        **points.as_record(),
    }
