"""A child process that answers requests: one line of JSON each way, every wait bounded, its death seen at once.

The child is started with the numbers of two pipes behind its command. It answers a request with any
number of `{"item": ...}` and one `{"reply": ...}` or `{"error": {fields of a Problem, kind}}`. What
it prints goes to a log, whose last lines are quoted when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_core import errors
from rft_core.errors import RftError, ServiceError
from rft_core.json_records import json_bytes

_SLICE_SECONDS = 0.2
_READ_BYTES = 2**18
_LOG_BYTES = 2000
_EXIT_GRACE_SECONDS = 5.0


class EngineDied(ServiceError):
    """The engine's process is gone; it can be started again."""


class EngineProcess:
    """One child process, from its start to its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """Start `command` with the two pipes' numbers appended, in a session of its own."""
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        self._log_path = log_path
        try:
            with log_path.open("ab") as log:
                self._child = subprocess.Popen(
                    [*command, str(to_child), str(from_child)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    pass_fds=(to_child, from_child),
                    start_new_session=True,
                )
        finally:
            os.close(to_child)
            os.close(from_child)
        # a child that does not read must not block `_send` beyond its deadline
        os.set_blocking(self._write, False)
        self._buffer = b""
        self._closed = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._child.poll() is None

    def call(self, operation: str, seconds: float, **fields: Any) -> Any:
        """Ask for one operation and wait for its reply; items are not expected."""
        messages = list(self._exchange(operation, seconds, fields))
        return messages[-1]["reply"]

    def stream(self, operation: str, seconds: float, **fields: Any) -> Generator[Any, None, Any]:
        """Ask for one operation, hand out its items as they come, and return its reply.

        Raises:
            EngineDied: the process ended; items that came before it are good.
            ServiceError: `seconds` passed; the process has been ended.
        """
        reply = None
        for message in self._exchange(operation, seconds, fields):
            if "item" in message:
                yield message["item"]
            else:
                reply = message["reply"]
        return reply

    def kill(self) -> None:
        """End the process and everything it started. Does nothing when it is gone."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            # the whole session: an engine starts processes of its own
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        os.close(self._write)
        os.close(self._read)

    def _exchange(self, operation: str, seconds: float, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        self._send(json_bytes({"do": operation, **fields}) + b"\n", operation, seconds, deadline)
        while True:
            message = json.loads(self._line(operation, seconds, deadline))
            if "error" in message:
                raise error_of(message["error"])
            yield message
            if "reply" in message:
                return

    def _send(self, data: bytes, operation: str, seconds: float, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._check(operation, seconds, deadline)
            _, writable, _ = select.select([], [self._write], [], _SLICE_SECONDS)
            if writable:
                try:
                    view = view[os.write(self._write, view) :]
                except BrokenPipeError:
                    raise self._death(operation) from None

    def _line(self, operation: str, seconds: float, deadline: float) -> bytes:
        parts: list[bytes] = [self._buffer]
        while b"\n" not in parts[-1]:
            if not self._closed and time.monotonic() > deadline:
                self._check(operation, seconds, deadline)
            readable, _, _ = select.select([self._read], [], [], _SLICE_SECONDS)
            if readable:
                data = os.read(self._read, _READ_BYTES)
                if not data:
                    raise self._death(operation)
                parts.append(data)
            elif self._child.poll() is not None:
                raise self._death(operation)
        line, _, self._buffer = b"".join(parts).partition(b"\n")
        return line

    def _check(self, operation: str, seconds: float, deadline: float) -> None:
        """Raise when the process is gone, or the deadline passed: then it is ended."""
        if not self.is_alive:
            raise self._death(operation)
        if time.monotonic() <= deadline:
            return
        self.kill()
        raise ServiceError(
            code="engine.deadline",
            what=f"{operation} did not end within {seconds:g} s",
            where=f"engine process {self.pid}, log {self._log_path}",
            why="every call to an engine is bounded by a deadline",
            state="the process was ended; the next call starts another with the present weights",
            do=f"a deadline above {seconds:g} s if the engine was at work, else see the end of its log",
        )

    def _death(self, operation: str) -> EngineDied:
        pid = self.pid
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is still writing down what ended it
            self._child.wait(_EXIT_GRACE_SECONDS)
        code = self._child.poll()
        self.kill()
        code = self._child.returncode if code is None else code
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return EngineDied(
            code="engine.died",
            what=f"the engine's process {pid} {ended} during {operation}",
            where=f"log {self._log_path}, which ends: {self._end_of_log()}",
            why="an engine's process lives as long as the engine",
            state="samples that were finished are kept; no weights are lost, the trainer has them",
            do=f"see {self._log_path}",
        )

    def _end_of_log(self) -> str:
        try:
            data = self._log_path.read_bytes()[-_LOG_BYTES:]
        except OSError:
            return "(no log)"
        return " | ".join(data.decode(errors="replace").strip().splitlines()[-8:]) or "(empty)"


def error_fields(error: RftError) -> dict[str, str]:
    """A typed error as JSON, for the child's side."""
    problem = error.problem
    names = ("code", "what", "where", "why", "state", "do", "bundle")
    return {"kind": type(error).__name__, **{name: str(getattr(problem, name)) for name in names}}


def error_of(fields: dict[str, str]) -> RftError:
    kinds: dict[str, type[RftError]] = {
        kind.__name__: kind for kind in RftError.__subclasses__() if kind.__module__ == errors.__name__
    }
    kind = kinds.get(fields.pop("kind"), ServiceError)
    return kind(**fields)
