"""Rows of a run up to one of its steps, as rules look at them: its first ones and its last ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.runs.verdict import RunFinding, constant_reward, present_findings

Row = Mapping[str, Any]

FIRST = 10
"""First rows that are kept: what a run is compared with that has changed since its beginning."""
LAST = 64
"""Last rows that are kept."""
FINDING_STEPS = 20
"""Rows of which a finding of the verdict holds, all of which must be there."""
CONSTANT_STEPS, CONSTANT_RESPONSES = 3, 1000
"""Steps and responses from which on a reward that was never another one is said at once: mostly a fault of the reward,
and twenty steps of a large model take an hour."""


class History:
    """First and last rows of a run; a run of any length takes the same memory."""

    def __init__(self, command: str = "") -> None:
        """Begin without a row; `command` (`rl`, `sft`, ...) made the run, which decides what can be changed."""
        self.command = command
        self.rollouts = ""
        """File of the last rollouts that were kept; empty without any."""
        self.evaluation: Row = {}
        """The last evaluation."""
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=LAST)
        self._length = 0
        self._findings: list[RunFinding] | None = None

    def add(self, row: Row) -> None:
        """Take the row of the next step."""
        if len(self._first) < FIRST:
            self._first.append(row)
        self._last.append(row)
        self._length += 1
        self._findings = None

    @property
    def row(self) -> Row:
        """Return the newest row."""
        return self._last[-1]

    def recent(self, window: int) -> list[Row]:
        """Return the last `window` rows; none where there are fewer."""
        return list(self._last)[-window:] if len(self._last) >= window else []

    def known(self) -> list[Row]:
        """Return every row that is kept, in the order of the steps."""
        kept = list(self._last)
        return self._first[: max(0, self._length - len(kept))] + kept

    def series(self, name: str, window: int) -> list[float]:
        """Return a metric of the last `window` rows; empty unless each of them has it."""
        if len(self._last) < window or number(self.row, name) is None:
            return []
        values = numbers(self.recent(window), name)
        return values if len(values) == window else []

    def beginning(self, name: str, count: int) -> list[float]:
        """Return a metric of the first rows that have it, `count` at most."""
        return numbers(self._first, name)[:count]

    def findings(self) -> list[RunFinding]:
        """Return the findings of the verdict on the last rows that their later steps cannot make untrue."""
        if self._findings is None:
            rows = self.recent(FINDING_STEPS)
            self._findings = present_findings(rows, self.rollouts) if rows else self._early()
        return self._findings

    def _early(self) -> list[RunFinding]:
        """Return what few steps with many responses show: a reward that is one and the same."""
        rows = list(self._last)
        responses = sum(numbers(rows, "data/samples"))
        if len(rows) < CONSTANT_STEPS or responses < CONSTANT_RESPONSES:
            return []
        finding = constant_reward(rows, self.rollouts)
        return [] if finding is None else [finding]


def number(row: Row, name: str) -> float | None:
    """Return a metric of a row; None where it is absent or no finite number, which files have as null."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Return a metric of the rows that have it."""
    return [value for row in rows if (value := number(row, name)) is not None]
