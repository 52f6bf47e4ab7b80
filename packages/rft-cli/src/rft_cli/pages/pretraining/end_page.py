"""End of a pre-training run: the curve of its loss, and the texts that its model continued, in terminal and browser."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from rft_cli.pages.charts import sparkline
from rft_trainer.runs.reader import RunFiles, is_number

CURVES = (("training", "sft/loss"), ("held out", "eval/loss"))
"""Names of the curves with their metrics, in nats a token."""
_WIDTH = 60
_PAGE_WIDTH, _PAGE_HEIGHT = 720, 240
_COLOURS = ("#3b6ecc", "#c2572b")
_LONGEST_SHOWN = 400
"""Characters of a text in the terminal."""


def is_continued(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the rows are texts that a model continued, and not answers with rewards."""
    return bool(rows) and not any("reward" in row for row in rows)


def curve_lines(run: RunFiles) -> list[str]:
    """Return a line for each curve of the loss: its first value, its course and its last value."""
    lines: list[str] = []
    for name, points in _curves(run):
        values = [value for _, value in points]
        lines.append(
            f"{name:<8}  {values[0]:.4f} {sparkline(values, _WIDTH)} {values[-1]:.4f}  "
            f"(steps {points[0][0]} to {points[-1][0]})"
        )
    return ["loss in nats a token", *lines] if lines else []


def text_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the texts of a step: what each began with, and what the model wrote."""
    table = Table(show_lines=True)
    for column in ("begins with", "goes on"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in ("prompt", "response")))
    return table


def text_section(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the texts of a step as a part of a page."""
    cells = "\n".join(
        f"<tr><td class=text>{html.escape(str(row.get('prompt', '')))}"
        f"<td class=text>{html.escape(str(row.get('response', '')))}"
        for row in rows
    )
    return (
        f"<h2>step {step}</h2><p class=dim>{len(rows)} texts that the model continued, drawn at temperature 1\n"
        f"<table><tr><th>begins with<th>goes on\n{cells}\n</table>"
    )


def curve_section(run: RunFiles) -> str:
    """Return the curves of the loss as a drawing for a page; "" where there is no point."""
    curves = _curves(run)
    points = [point for _, curve in curves for point in curve]
    if not points:
        return ""
    last, low, high = max(s for s, _ in points), min(v for _, v in points), max(v for _, v in points)

    def place(step: int, value: float) -> str:
        across = _PAGE_WIDTH * step / max(last, 1)
        return f"{across:.1f},{_PAGE_HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"

    lines = "".join(
        f'<polyline fill=none stroke="{colour}" stroke-width=2 points="{" ".join(place(*point) for point in curve)}"/>'
        for (_, curve), colour in zip(curves, _COLOURS, strict=False)
    )
    names = ", ".join(
        f'<span style="color:{colour}">{name}</span> {curve[0][1]:.4f} to {curve[-1][1]:.4f}'
        for (name, curve), colour in zip(curves, _COLOURS, strict=False)
    )
    return (
        f"<h2>loss in nats a token</h2><p class=dim>{names}; {last} steps; the axis is from {low:.4f} to {high:.4f}\n"
        f'<svg viewBox="-4 -4 {_PAGE_WIDTH + 8} {_PAGE_HEIGHT + 8}" width="100%" role=img '
        f'aria-label="loss by step">{lines}</svg>'
    )


def _curves(run: RunFiles) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the curves that have a point, each with its (step, value)."""
    found = [
        (name, _points(rows, metric))
        for (name, metric), rows in zip(CURVES, (run.metrics, run.evaluations), strict=True)
    ]
    return [(name, points) for name, points in found if points]


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    # a step may be evaluated twice, at last with the best weights put back, which lie before it
    by_step = {int(row["step"]): float(row[metric]) for row in reversed(rows) if is_number(row.get(metric))}
    return [(step, by_step[step]) for step in sorted(by_step) if math.isfinite(by_step[step])]


def _shown(text: object) -> str:
    """Return a text in which control characters show."""
    plain = json.dumps(str(text or ""), ensure_ascii=False)[1:-1].replace("\\n", "\n")
    return escape(plain if len(plain) <= _LONGEST_SHOWN else plain[:_LONGEST_SHOWN] + "...")
