"""Wait for a server that is away: one clock for all requests to it, one line when it begins, few afterwards.

After a few failures in a row a circuit breaker lets one request at a time through, until the server answers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rft_core.errors import OutageError
from rft_trainer.rewards.servers.circuit_breaker import OPENS_AFTER, Backoff, CircuitBreaker

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.2
_REPORT_AFTER = (60.0, 300.0)
_REPORT_EVERY = 600.0


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class WaitRules:
    """Length of the wait for a server, and what ends it early."""

    seconds: float
    """From the first request that failed; any answer of the server begins anew."""
    goes_on: bool = False
    """Whether responses go on without a score afterwards; otherwise the run ends with `OutageError`."""
    stopped: Callable[[], bool] = _never
    """Whether the run was asked to stop."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    backoff: Backoff = field(default_factory=Backoff)


class StillAway(Exception):
    """The server is away for longer than it is waited for, and responses go on without a score."""


class ServerWait:
    """The state of one server, shared by all threads that ask it: whether it is away, and since when."""

    def __init__(self, name: str, where: str, rules: WaitRules) -> None:
        """Begin with a server that is there; `name` and `where` (flag and URL) are for messages."""
        self._name, self._where, self._rules = name, where, rules
        self._lock = threading.Lock()
        self._since: float | None = None
        self._began = 0.0
        """The same moment on the wall clock."""
        self._next_report = 0.0
        self._is_over = False
        self._is_closed = False
        self._answered_at = rules.clock()
        self._breaker = CircuitBreaker(rules.backoff)

    def answered(self) -> None:
        """Record that the server has answered: an outage, if there was one, is over."""
        with self._lock:
            now = self._rules.clock()
            self._answered_at = now
            if self._since is not None:
                _LOG.warning("%s answers again, after %.0f s", self._name, now - self._since)
            self._since, self._is_over = None, False
            self._breaker.answered()

    def answered_after(self, moment: float) -> bool:
        """Return whether the server has answered any request after `moment` of the clock."""
        return self._answered_at > moment

    def now(self) -> float:
        """Return the present moment of the clock."""
        return self._rules.clock()

    def begin(self) -> None:
        """Wait before a request is sent for the first time, while the server is known to be away.

        Raises:
            StillAway: as `pause`.
            OutageError: as `pause`.
        """
        with self._lock:
            now = self._rules.clock()
            if self._since is None or self._breaker.may_try(now, threading.get_ident()):
                return
            since = self._since
            if self._is_over:
                raise self._ended(now - since, "it has not answered since")
        self._sleep(now, since, "it has not answered yet")

    def pause(self, reason: str, num_pauses: int, retry_after: float | None = None) -> None:
        """Wait until the next try of a request that failed.

        Args:
            reason: of the failure.
            num_pauses: that this request has made before; each is twice as long.
            retry_after: seconds that the server asked for.

        Raises:
            StillAway: the time is over, and responses go on without a score.
            OutageError: the time is over, or the run was asked to stop.
        """
        with self._lock:
            now = self._rules.clock()
            if self._since is None:
                self._since, self._began = now, self._rules.wall_clock()
                self._next_report = now
            since = self._since
            until = since + self._rules.seconds
            opens = self._breaker.failed(now, threading.get_ident(), retry_after)
            if now >= until or self._is_over:
                raise self._ended(now - since, reason)
            self._report(now, since, until, reason)
            if opens:
                _LOG.info("%s: %d failures in a row, from here one request at a time", self._name, OPENS_AFTER)
            wake = now + self._rules.backoff.pause(num_pauses, retry_after)
        self._sleep(wake, since, reason)

    def gave_up(self) -> None:
        """Record that this thread sends its request no more, so that another may send one."""
        with self._lock:
            self._breaker.release(threading.get_ident())

    def close(self) -> None:
        """End every wait, as for a program that is interrupted."""
        self._is_closed = True

    def _sleep(self, wake: float, since: float, reason: str) -> None:
        """Sleep until `wake`, and on until this request may be sent; a last one when the time is over."""
        until = since + self._rules.seconds
        # a last try when the time is over, however long the server asked to be left alone
        wake = min(wake, until)
        while True:
            now = self._rules.clock()
            with self._lock:
                # the answer to another request ends the pause; a new outage has another beginning
                if self._since != since:
                    return
                if self._is_over and now >= until:
                    raise self._ended(now - since, reason)
                # when the time is over the breaker lets one through, however long its pause is
                moment = math.inf if now >= until else now
                if now >= wake and self._breaker.may_try(moment, threading.get_ident()):
                    return
            if self._rules.stopped() or self._is_closed:
                raise self._interrupted(reason)
            self._rules.sleep(min(wake - now, _LOOK_SECONDS) if wake > now else _LOOK_SECONDS)

    def _report(self, now: float, since: float, until: float, reason: str) -> None:
        """Say what is waited for, since when and until when; under the lock."""
        if now < self._next_report:
            return
        away = now - since
        self._next_report = since + next((s for s in _REPORT_AFTER if s > away), away + _REPORT_EVERY)
        _LOG.warning(
            "%s is away since %s: %s; waiting until %s (--reward_wait %g), then --on_reward_outage %s",
            self._name,
            _clock_time(self._began),
            reason,
            _clock_time(self._began + until - since),
            self._rules.seconds,
            "unscored" if self._rules.goes_on else "stop",
        )

    def _ended(self, seconds: float, reason: str) -> Exception:
        """Return the error of a wait whose time is over; under the lock."""
        if self._rules.goes_on:
            if not self._is_over:
                _LOG.warning("%s is away for %.0f s: responses go on without a reward", self._name, seconds)
            self._is_over = True
            return StillAway(reason)
        self._is_over = True
        return OutageError(
            code="reward.outage",
            what=f"{self._name} is away for {seconds:.0f} s: {reason}",
            where=self._where,
            why=f"the run waits for at most {self._rules.seconds:g} s (--reward_wait), and ends then "
            "(--on_reward_outage stop)",
            state="these responses have no reward",
            do="start the server, then the same command again",
        )

    def _interrupted(self, reason: str) -> OutageError:
        return OutageError(
            code="reward.wait_interrupted",
            what=f"the wait for {self._name} was interrupted: {reason}",
            where=self._where,
            why="the run was asked to stop",
            state="these responses have no reward",
            do="start the server, then the same command again",
        )


def _clock_time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
