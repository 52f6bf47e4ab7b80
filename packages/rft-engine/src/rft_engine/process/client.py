"""A child process that answers requests: one line each way, every wait bounded, its death seen at once.

Lines are those of `rft_core.exact_records`: JSON, and the 64 bits of its floats behind it.
It answers a request with any number of `{"item": ...}` and one `{"reply": ...}` or `{"error": error_fields}`. What
it prints goes to a log, whose last lines are quoted when it dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rft_core.child_process import ChildProcess, error_of, wait_for_any
from rft_core.errors import ServiceError
from rft_core.exact_records import exact_line, value_of_line
from rft_engine.process.hang_watch import HangLimits, HangWatch
from rft_engine.process.requests import garbage
from rft_engine.process.settings import deadline_error

_SLICE_SECONDS = 0.2
_LOG_BYTES = 2000
_EXIT_GRACE_SECONDS = 5.0


class EngineDied(ServiceError):
    """The engine's process is gone; it can be started again."""


class EngineProcess(ChildProcess):
    """One child process, from its start to its end."""

    renews_deadline = False
    """Whether the deadline of a call restarts with every message."""
    hang_limits = HangLimits()
    """When a call counts as hung, long before its deadline."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """Start `command` with the two pipes' numbers appended; what it prints is appended to the log."""
        super().__init__(command, environment, log=log_path)
        self._log_path = log_path

    def call(self, operation: str, seconds: float, **fields: Any) -> Any:
        """Ask for one operation and wait for its reply; items are not expected.

        Raises:
            ServiceError: as of `stream`.
        """
        messages = list(self._exchange(operation, seconds, fields))
        return messages[-1]["reply"]

    def stream(self, operation: str, seconds: float, **fields: Any) -> Generator[Any, None, Any]:
        """Ask for one operation, hand out its items as they come, and return its reply.

        Raises:
            EngineDied: the process ended, or hung and has been ended; items that came before it are good.
            ServiceError: `seconds` passed, and the process has been ended; or a line is no message.
        """
        reply = None
        for message in self._exchange(operation, seconds, fields):
            if "item" in message:
                yield message["item"]
            else:
                reply = message["reply"]
        return reply

    def _exchange(self, operation: str, seconds: float, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        # a start waits for files, other processes and devices: of that only the deadline tells
        watch = HangWatch(self.pid, HangLimits() if operation == "start" else self.hang_limits)
        self.send(exact_line({"do": operation, **fields}))
        # a request may be larger than the pipe: a worker that does not read must not hold this process for ever
        while self.is_sending:
            self._check(operation, seconds, deadline)
            wait_for_any([self], _SLICE_SECONDS)
            self._look(operation, watch)
        while True:
            # also after a sign of life, which is a message without a result
            if self.renews_deadline:
                deadline = time.monotonic() + seconds
            message = _decoded(self._line(operation, seconds, deadline, watch))
            watch.received()
            if "error" in message:
                raise error_of(message["error"])
            yield message
            if "reply" in message:
                return

    def _line(self, operation: str, seconds: float, deadline: float, watch: HangWatch) -> bytearray:
        while not self.lines:
            if self.has_ended:
                raise self._death(operation)
            # an answer that is there is taken even after the deadline, so this is asked without a line alone
            if time.monotonic() > deadline:
                self._check(operation, seconds, deadline)
            # what a dead process has sent is read before its death is noticed
            if wait_for_any([self], _SLICE_SECONDS):
                continue
            if not self.is_alive:
                raise self._death(operation)
            self._look(operation, watch)
        return self.lines.popleft()

    def _check(self, operation: str, seconds: float, deadline: float) -> None:
        """Raise when the process is gone, or the deadline passed: then it is ended."""
        if self.has_ended or not self.is_alive:
            raise self._death(operation)
        if time.monotonic() <= deadline:
            return
        self.kill()
        raise deadline_error(
            f"{operation} did not end within {seconds:g} s",
            where=f"engine process {self.pid}, log {self._log_path}",
            state="the process was killed; the next call starts a new one with the current weights",
            do=f"set a deadline above {seconds:g} s if the engine was still working; else see the end of its log",
        )

    def _look(self, operation: str, watch: HangWatch) -> None:
        """End the process and raise where it counts as hung."""
        if hung := watch.look():
            self.kill()
            raise EngineDied(
                code="engine.hung",
                what=f"the engine's process {self.pid} {hung} during {operation}, and was ended",
                where=f"log {self._log_path}, which ends: {self._end_of_log()}",
                why="an engine's process must work while it owes an answer",
                state="finished samples are kept; no weights are lost, because the trainer holds them",
                do=f"see {self._log_path}",
            )

    def _death(self, operation: str) -> EngineDied:
        how = self.kill(_EXIT_GRACE_SECONDS)  # it is still writing down what ended it
        return EngineDied(
            code="engine.died",
            what=f"the engine's process {self.pid} {how} during {operation}",
            where=f"log {self._log_path}, which ends: {self._end_of_log()}",
            why="an engine's process must live as long as the engine",
            state="finished samples are kept; no weights are lost, because the trainer holds them",
            do=f"see {self._log_path}",
        )

    def _end_of_log(self) -> str:
        try:
            data = self._log_path.read_bytes()[-_LOG_BYTES:]
        except OSError:
            return "(no log)"
        return " | ".join(data.decode(errors="replace").strip().splitlines()[-8:]) or "(empty)"


def _decoded(line: bytearray) -> dict[str, Any]:
    """One line of the child as a message.

    Raises:
        ServiceError: it is none.
    """
    # not JSONDecodeError alone: bytes that are no text, or no floats, raise another ValueError
    with contextlib.suppress(ValueError):
        message = value_of_line(line)
        if isinstance(message, dict) and any(kind in message for kind in ("item", "reply", "error")):
            return cast(dict[str, Any], message)
    raise garbage(f"the engine's process sent a line that is no message: {line[:200].decode(errors='replace')!r}")
