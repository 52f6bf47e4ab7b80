"""What a case is, and how numbers are drawn for those that are not written by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """Where an equation is printed."""

    paper: str
    """arXiv number, or the name of what has none."""
    where: str
    """Equation or section."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question to an implementation. `None` in a list stands for NaN, at masked places only."""

    kind: str
    name: str
    label: str
    """Short and unique among the cases of its name."""
    pins: str
    """What an implementation may get wrong that this case shows."""
    source: Source
    inputs: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    hand: Mapping[str, Any] | None = None
    """Results worked out by hand, as fractions in text; those that are left out come from the twin."""
    arithmetic: str = ""
    """The arithmetic of `hand`."""
    float32: bool = True
    """Whether float32 inputs can carry the case at all; false where the point is in digits that they lack."""

    @property
    def id(self) -> str:
        """kind/name/label."""
        return f"{self.kind}/{self.name}/{self.label}"


class Draw:
    """Numbers from a seed, with few digits, so that a person can read a case."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def numbers(self, count: int, low: float, high: float, digits: int = 3) -> list[float]:
        """Numbers in [low, high]."""
        return [round(low + (high - low) * self._random.random(), digits) for _ in range(count)]

    def rows(self, lengths: Sequence[int], low: float, high: float, digits: int = 3) -> list[list[float]]:
        """A list of numbers a sequence."""
        return [self.numbers(length, low, high, digits) for length in lengths]


def ones(lengths: Sequence[int]) -> list[list[int]]:
    """A mask without holes."""
    return [[1] * length for length in lengths]


def added(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[list[float]]:
    """Sums of two lists of rows, rounded to the digits that a case shows."""
    return [[round(a + b, 6) for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]


def hidden(rows: Sequence[Sequence[Any]], mask: Sequence[Sequence[int]]) -> list[list[Any]]:
    """NaN at masked places."""
    return [[v if m else None for v, m in zip(row, marks, strict=True)] for row, marks in zip(rows, mask, strict=True)]


def spread(values: Sequence[float], mask: Sequence[Sequence[int]]) -> list[list[float]]:
    """The number of a sequence at each of its tokens."""
    return [[value] * len(marks) for value, marks in zip(values, mask, strict=True)]
