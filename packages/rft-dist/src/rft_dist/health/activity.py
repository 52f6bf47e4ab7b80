"""Activity of this process, written by its main thread and read by the threads that watch it.

Every write is one assignment of an immutable value, so a reader sees the old one or the new one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

START = "start"
"""The phase before the first one of a step: reading, planning, loading weights."""

OTHER = "other"
"""Between the phases of a step."""

_OWN_FOLDER = f"{Path(__file__).resolve().parents[1]}/"
_WATCH_FOLDER = f"{Path(__file__).resolve().parent}/"
_NOT_A_SITE = ("<frozen", "<string>", "contextlib.py")
_STACK_LINES = 12


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that this rank entered.

    Example: `Call(12, "sum", (3, 4), "float32", "rft_trainer/update/optimizer_step.py:130 (__call__)")`.
    """

    number: int
    """1 for the first collective of the process; equal on all ranks of a correct program."""
    name: str
    """sum, max, gather, broadcast."""
    shape: tuple[int, ...]
    dtype: str
    site: str
    """The first line outside of this package that led to it."""

    def describe(self) -> str:
        """Return the text by which messages name the collective."""
        return f"#{self.number} {self.name} {list(self.shape)} {self.dtype} at {self.site}"

    def matches(self, other: Call) -> bool:
        """Return whether two ranks that make these calls take part in the same collective.

        The two sides of a broadcast often stand in two branches of one function, so its line is left out.
        """
        same = (self.name, self.shape, self.dtype) == (other.name, other.shape, other.dtype)
        if self.name == "broadcast":
            return same and _function(self.site) == _function(other.site)
        return same and self.site == other.site


@dataclass(frozen=True, slots=True)
class InCall:
    """The last collective and where this rank is with it; `since` is the clock at its start or end."""

    call: Call
    inside: bool
    since: float


class Activity:
    """The state of one process; `clock` gives seconds that never go back."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_calls = 0
        self._main = threading.main_thread().ident or 0
        self._step: Callable[[], int] = lambda: 0
        self.last: InCall | None = None
        self.phase: tuple[str, float] = (START, clock())
        self.steps_done = 0
        """Steps of this process that have ended; those before a resume do not count."""
        self.moved = clock()
        """When something last went on: a phase, a collective, a step."""
        self.waited = 0.0
        """Seconds inside collectives of this program; those that libraries make themselves do not count."""

    def follow(self, step: Callable[[], int]) -> None:
        """Register the function that returns the number of the step under way."""
        self._step = step

    @property
    def step(self) -> int:
        """The step under way; 0 before the first."""
        return self._step()

    def enter_phase(self, name: str | None) -> None:
        """Record that the main thread enters a phase; None: it is between phases."""
        now = self._clock()
        self.phase, self.moved = (name or OTHER, now), now

    def end_step(self) -> None:
        """Record that a step has ended."""
        self.steps_done += 1
        self.moved = self._clock()

    def enter(self, name: str, shape: tuple[int, ...], dtype: str) -> Call:
        """Record that this rank is about to join a collective."""
        self._num_calls += 1
        call = Call(self._num_calls, name, shape, dtype, call_site())
        now = self._clock()
        self.last, self.moved = InCall(call, True, now), now
        return call

    def leave(self, call: Call) -> None:
        """Record that a collective has finished on this rank."""
        now = self._clock()
        if self.last is not None and self.last.call is call:
            self.waited += now - self.last.since
        self.last, self.moved = InCall(call, False, now), now

    def stack(self) -> list[str]:
        """The lines that the main thread is in, innermost first."""
        # read from another thread, because the main one may be inside a call that never returns
        frame = sys._current_frames().get(self._main)
        lines: list[str] = []
        while frame is not None and len(lines) < _STACK_LINES:
            file = frame.f_code.co_filename
            if not file.startswith(_WATCH_FOLDER) and (lines or not file.endswith("/threading.py")):
                lines.append(f"{_short(file)}:{frame.f_lineno} ({frame.f_code.co_name})")
            frame = frame.f_back
        return lines


_SITES: dict[tuple[CodeType, int], str] = {}


def call_site() -> str:
    """file:line (function) of the nearest caller that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    # every collective comes through here, mostly from a line that was seen before
    key = (frame.f_code, frame.f_lineno)
    if key not in _SITES:
        _SITES[key] = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
    return _SITES[key]


def _is_own(file: str) -> bool:
    return file.startswith(_OWN_FOLDER) or file.endswith(_NOT_A_SITE) or file.startswith("<")


def _short(file: str) -> str:
    """The last two parts of a path: ranks may have the same code in different folders."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


def _function(site: str) -> str:
    """Return a call site without its line number."""
    head, _, name = site.partition(" ")
    return f"{head.rpartition(':')[0]} {name}"
