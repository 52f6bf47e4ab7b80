"""Circuit breaker for a server: after several failures in a row one request at a time is sent until one is answered.

The pattern is that of M. Nygard, Release It! (2nd ed., 2018), chapter 5: closed, open, and half-open for a single try.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

OPENS_AFTER = 5
"""Failures in a row, over all requests."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_LEAST_PAUSE = 0.05


# no result of a run depends on it: it only moves the moments at which a server that is away is asked again
_JITTER = random.SystemRandom().random


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between tries: twice as long each time, drawn so that clients that failed together return apart."""

    jitter: Callable[[], float] = _JITTER
    """A number from 0 to 1."""

    def pause(self, num_pauses: int, retry_after: float | None = None) -> float:
        """Return seconds: of `1 * 2^n`, at most 30, the upper half; what the server asked for, and up to a tenth more.

        Args:
            num_pauses: those before.
            retry_after: seconds that the server asked for.
        """
        if retry_after is not None:
            return max(retry_after, _LEAST_PAUSE) * (1.0 + 0.1 * self.jitter())
        # a power of at most 30: a float has no room for 2 to the thousandth
        return min(_FIRST_PAUSE * 2.0 ** min(num_pauses, 30), _LONGEST_PAUSE) * (1.0 - 0.5 * self.jitter())


@dataclass(slots=True)
class CircuitBreaker:
    """State of one server over all threads that ask it; its owner holds a lock around every call."""

    backoff: Backoff
    num_failures: int = 0
    """In a row, over all requests."""
    _num_pauses: int = 0
    _next_try: float = 0.0
    _holder: int | None = field(default=None)
    """The thread whose request is the one that may be sent."""

    @property
    def is_open(self) -> bool:
        """True while one request at a time is sent."""
        return self.num_failures >= OPENS_AFTER

    def failed(self, now: float, thread: int, retry_after: float | None = None) -> bool:
        """Record a failure of this thread's request; return True where it is the one that opens the breaker."""
        self.release(thread)
        self.num_failures += 1
        if self.is_open:
            self._next_try = now + self.backoff.pause(self._num_pauses, retry_after)
            self._num_pauses += 1
        return self.num_failures == OPENS_AFTER

    def may_try(self, now: float, thread: int) -> bool:
        """Return whether this thread may send its request now; while the breaker is open it is then the only one."""
        if not self.is_open or self._holder == thread:
            return True
        if self._holder is not None or now < self._next_try:
            return False
        self._holder = thread
        return True

    def release(self, thread: int) -> None:
        """Let another thread send its request, if this one was to send the only one."""
        if self._holder == thread:
            self._holder = None

    def answered(self) -> None:
        """Close the breaker: the server is there."""
        self.num_failures, self._num_pauses, self._holder = 0, 0, None
