"""Numbers of a run by name and step, in arrays that grow, and thinned to what a curve can show."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rft.report.columns import MOST_POINTS
from rft_trainer.runs.reader import is_number

MOST_NAMES = 2000
"""Names of metrics that are kept; further ones are passed over."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinnedCurves:
    """Points of some curves from one place on; each is the mean of neighbouring rows."""

    rows_a_point: int
    """A power of 2, so that points which are sent already stay as they are while rows are added."""
    start: int
    """Number of the first point."""
    complete: int
    """Points that further rows do not change."""
    steps: list[float]
    series: dict[str, list[float | None]]

    def as_record(self) -> dict[str, Any]:
        """Return the points as plain JSON."""
        return asdict(self)


class MetricTable:
    """Rows with a step as one array a name; a place without a number is not a number there."""

    def __init__(self) -> None:
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}

    @property
    def num_rows(self) -> int:
        """Length of every column."""
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order in which rows had them."""
        return list(self._columns)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the numbers of rows; a row without a step is passed over."""
        for row in rows:
            step = row.get("step")
            if not is_number(step):
                continue
            for name, value in row.items():
                if name not in self._columns and name != "step" and is_number(value):
                    self._add_column(name)
            self._steps.append(step)
            for name, column in self._columns.items():
                value = row.get(name)
                column.append(value if is_number(value) else math.nan)

    def clear(self) -> None:
        """Forget all rows and their names."""
        self._steps = array("d")
        self._columns = {}

    def thinned(self, names: Sequence[str], *, rows_a_point: int = 0, start: int = 0) -> ThinnedCurves:
        """Return the points of some columns, at most `MOST_POINTS`.

        Args:
            names: those that are no columns are passed over.
            rows_a_point: of the points that the caller has.
            start: complete points that the caller has; all are given where they are of another width.
        """
        width = 1
        while math.ceil(self.num_rows / width) > MOST_POINTS:
            width *= 2
        complete = self.num_rows // width
        begin = start if rows_a_point == width and 0 <= start <= complete else 0
        cuts = range(begin * width, self.num_rows, width)
        return ThinnedCurves(
            rows_a_point=width,
            start=begin,
            complete=complete,
            steps=[self._steps[min(cut + width, self.num_rows) - 1] for cut in cuts],
            series={
                name: [_mean(self._columns[name][cut : cut + width]) for cut in cuts]
                for name in dict.fromkeys(names)
                if name in self._columns
            },
        )

    def _add_column(self, name: str) -> None:
        if len(self._columns) < MOST_NAMES:
            self._columns[name] = array("d", [math.nan]) * self.num_rows


def _mean(values: Sequence[float]) -> float | None:
    numbers = [value for value in values if not math.isnan(value)]
    # divided before they are added: the sum of numbers may leave what a float holds
    return float(f"{math.fsum(value / len(numbers) for value in numbers):.{_DIGITS}g}") if numbers else None
