"""How far results are from what a case expects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def flat(value: Any) -> Iterator[float]:
    """The numbers of nested lists; None is NaN."""
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield math.nan if value is None else float(value)


def distance(found: Any, expected: Any) -> float:
    """Largest difference over the largest expected number; the difference itself where all expected are 0.

    NaN where either has one, or an infinity, that the other lacks.
    """
    got, wanted = list(flat(found)), list(flat(expected))
    assert len(got) == len(wanted), f"{len(got)} numbers, expected {len(wanted)}"
    if any(not math.isfinite(value) for value in got):
        return math.nan
    scale = max((abs(value) for value in wanted), default=0.0) or 1.0
    return max((abs(g - w) for g, w in zip(got, wanted, strict=True)), default=0.0) / scale


def distances(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """The distance of each result that was found, by name."""
    return {name: distance(value, expected[name]) for name, value in found.items() if name in expected}


def worst(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest distance; NaN if any is."""
    each = distances(found, expected).values()
    return math.nan if any(math.isnan(d) for d in each) else max(each)
