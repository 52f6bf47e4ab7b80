"""Numbers of a run as columns over its steps, short enough for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from rft_trainer.runs.reader import is_number

MOST_POINTS = 1500
"""Points of one curve; a longer run is averaged over neighbouring steps."""
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class CurveColumns:
    """CurveColumns of equal length; a place without a number is None."""

    steps: list[float]
    series: dict[str, list[float | None]]
    steps_a_point: int
    """Steps whose mean is one point; 1 = every step is shown."""


def columns(rows: Sequence[Mapping[str, Any]], *, prefix: str = "") -> CurveColumns:
    """Return the numeric columns of rows that have a `step`.

    Args:
        rows: records of metrics.jsonl or evals.jsonl.
        prefix: names must begin with it; empty = all.
    """
    with_step = [row for row in rows if is_number(row.get("step"))]
    width = max(1, -(-len(with_step) // MOST_POINTS))
    groups = [with_step[start : start + width] for start in range(0, len(with_step), width)]
    names = dict.fromkeys(
        name
        for row in with_step
        for name, value in row.items()
        if name.startswith(prefix) and name != "step" and is_number(value)
    )
    series = {name: [_mean([row.get(name) for row in group]) for group in groups] for name in names}
    return CurveColumns([float(group[-1]["step"]) for group in groups], series, width)


def _mean(values: Sequence[object]) -> float | None:
    numbers = [float(value) for value in values if is_number(value)]
    return float(f"{fsum(numbers) / len(numbers):.{_DIGITS}g}") if numbers else None
