"""Numbers as a line of text: a sparkline, a bar of shares, a duration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """The values as blocks from lowest to highest, the latest to the right; runs too long are averaged."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        cuts = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(finite), max(finite)
    if high == low:
        return blocks[len(blocks) // 2] * len(finite)
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / (high - low) * len(blocks)))] for value in finite)


def wrapped(parts: Sequence[str], width: int, gap: str = "   ") -> str:
    """The parts side by side, on a new line where the next one would pass `width`; no part is broken."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + len(gap) + len(part) <= width:
            lines[-1] += gap + part
        else:
            lines.append(part)
    return "\n".join(lines)


def shares(seconds: Mapping[str, float], width: int) -> dict[str, int]:
    """Divide `width` cells among the parts; they sum to `width` when there is any time at all."""
    total = math.fsum(value for value in seconds.values() if value > 0)
    if total <= 0:
        return dict.fromkeys(seconds, 0)
    exact = {name: max(0.0, value) / total * width for name, value in seconds.items()}
    cells = {name: int(value) for name, value in exact.items()}
    # the cells that rounding down left over go to the largest remainders
    for name in sorted(exact, key=lambda name: exact[name] - cells[name], reverse=True)[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def duration(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`; empty for none."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return ""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"


def amount(value: float | None, digits: int = 3) -> str:
    """A number for a person: `12,345`, `0.125`, `1.0e-06`; empty for none."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"
