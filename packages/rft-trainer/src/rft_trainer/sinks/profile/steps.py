"""The steps that a profile covers, as they are written: 5, or 3-5. No torch is imported here."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")
MOST = 100
"""Steps of a profile: a trace of many more fills the memory of the process that writes it."""


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Steps of a run, counted from 1, both ends included."""

    first: int
    last: int

    @property
    def number(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def parse_steps(text: str) -> ProfiledSteps:
    """Return the steps; raises `ValueError` with the reason."""
    found = _STEPS.fullmatch(text.strip())
    if found is None:
        raise ValueError("a step, or the first and the last of several with a dash: 5, or 3-5")
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 1 or last < first:
        raise ValueError("steps count from 1, and the last is not before the first")
    if last - first >= MOST:
        raise ValueError(f"a trace holds every operation of its steps: {MOST} of them at most")
    return ProfiledSteps(first, last)
