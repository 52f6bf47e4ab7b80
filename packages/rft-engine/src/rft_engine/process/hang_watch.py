"""Watch over a process that owes an answer: stopped (SIGSTOP), asleep although it has work, or silent for too long.

The system tells the first two: the state of a process and the processor time that it and its children have used. A
slow process runs or waits for a disk, and is left alone. Seconds count while this process looks: one that was itself
stopped, as a suspended job is with all its processes, does not take that time for the other's.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

_PROCESSES = Path("/proc")
_LOOK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 2.0
_STOPPED = ("T", "t")
_ASLEEP = (*_STOPPED, "S", "I", "Z")
_LEAST_TICKS = 2
"""Of processor time between two looks, 10 ms each: less is what a process uses that only waits."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds after which a process that owes an answer counts as hung."""

    stopped: float = 6.0
    asleep: float = math.inf
    """Without processor time, and not waiting for a disk."""
    least_silence: float = math.inf
    """Without a message, or `pauses` times the longest pause so far if that is longer."""
    pauses: float = 8.0


class HangWatch:
    """Observations of one process during one call; `look` as often as one likes, `received` with every message."""

    def __init__(self, pid: int, limits: HangLimits) -> None:
        self._pid, self._limits = pid, limits
        self._longest_pause = 0.0
        self._num_messages = 0
        self._start_again()

    def received(self) -> None:
        """Count a message of the process."""
        # of the first one the pause has the start of the call in it, and nothing to compare it with
        self._longest_pause = max(self._longest_pause, time.monotonic() - self._last_message)
        self._num_messages += 1
        self._start_again()

    def look(self) -> str:
        """Return why the process counts as hung, in words behind its name; empty while it does not."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return ""
        seconds, self._looked = min(now - self._looked, _LONGEST_LOOK_SECONDS), now
        states, ticks = _states_and_ticks(self._pid)
        is_idle = ticks - self._ticks < _LEAST_TICKS and all(state in _ASLEEP for state in states)
        self._ticks = ticks
        self._stopped = self._stopped + seconds if any(state in _STOPPED for state in states) else 0.0
        self._asleep = self._asleep + seconds if states and is_idle else 0.0
        self._silent += seconds
        limits = self._limits
        if self._stopped >= limits.stopped:
            return f"was stopped (SIGSTOP) for {self._stopped:.0f} s"
        if self._asleep >= limits.asleep:
            return f"used no processor time for {self._asleep:.0f} s"
        if self._num_messages > 1 and self._silent >= max(limits.least_silence, limits.pauses * self._longest_pause):
            return f"was silent for {self._silent:.0f} s, {self._longest_pause:.1f} s at most before"
        return ""

    def _start_again(self) -> None:
        self._last_message = self._looked = time.monotonic()
        self._stopped = self._asleep = self._silent = 0.0
        # the first look compares with nothing
        self._ticks = -_LEAST_TICKS


def _states_and_ticks(pid: int) -> tuple[list[str], int]:
    """Return the states of a process and its descendants, and the ticks of processor time that they have used."""
    states: list[str] = []
    ticks, left = 0, [pid]
    while left:
        folder = _PROCESSES / str(left.pop())
        # gone meanwhile, or a system that does not tell
        with contextlib.suppress(OSError, IndexError, ValueError):
            # behind the program's name, which may hold spaces and brackets
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            states.append(fields[0])
            ticks += int(fields[11]) + int(fields[12])
            for children in (folder / "task").glob("*/children"):
                left += map(int, children.read_text().split())
    return states, ticks
