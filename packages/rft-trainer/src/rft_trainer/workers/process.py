"""One scoring process and its three pipes, none of which can block this process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping

from rft_core import fault_points

_START = fault_points.declare("reward.start", "a scoring process is about to be started")

_ALARM_GRACE = 1.0
_CHUNK = 1 << 16
_MAX_REPLY = 1 << 24
_MAX_OUTPUT = 1 << 13


class ScoringProcess:
    """A child that runs `rft_trainer.workers.main`, from start to kill.

    It leads its own process group: a kill reaches what it has forked, and Ctrl-C on the terminal
    reaches this process alone, which then ends the child in order.
    """

    def __init__(self, task: str, memory_bytes: int, start_seconds: float) -> None:
        fault_points.fault_point(_START)
        # -P: a file named math.py or json.py in the working directory must not stand in for the library
        command = [sys.executable, "-P", "-m", "rft_trainer.workers.main", task, str(memory_bytes)]
        pipe = subprocess.PIPE
        # sympy orders sets by hash: a fixed seed gives the same scores in every process
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, env=environment
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self._requests, self._replies, self._output = (
            self._child.stdin.fileno(),
            self._child.stdout.fileno(),
            self._child.stderr.fileno(),
        )
        for pipe_end in (self._requests, self._replies, self._output):
            os.set_blocking(pipe_end, False)
        self._unsent = bytearray()
        self._partial = bytearray()
        self._messages: deque[Mapping[str, object]] = deque()
        self._tail = b""
        self._output_open = True
        self.is_ready = False
        self.was_ready = False
        self.has_ended = False
        self.job_id: int | None = None
        self.seconds_allowed = start_seconds
        self.deadline: float | None = time.monotonic() + start_seconds

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_late(self) -> bool:
        """Return whether start or job have taken longer than allowed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def last_output(self) -> str:
        """The end of the child's output."""
        return self._tail.decode(errors="replace")

    def become_ready(self) -> None:
        """Mark the task as loaded; there is no deadline until the first job."""
        self.is_ready = self.was_ready = True
        self.deadline = None

    def begin(self, job_id: int, payload: Mapping[str, object], seconds: float) -> None:
        """Queue a job; it is sent as fast as the child reads."""
        assert self.job_id is None, f"job {self.job_id} is not finished"
        self.job_id, self.seconds_allowed, self.deadline = job_id, seconds, time.monotonic() + seconds
        request = {"id": job_id, "alarm": seconds + _ALARM_GRACE, "payload": dict(payload)}
        self._unsent += json.dumps(request).encode() + b"\n"

    def finish(self) -> None:
        """Mark the job as finished, after its reply."""
        self.job_id = self.deadline = None

    def take_messages(self) -> list[Mapping[str, object]]:
        """Return the replies that have arrived since the last call."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the events that this process waits for; the data of each is the function to call."""
        if not self.has_ended:
            selector.register(self._replies, selectors.EVENT_READ, self._read_replies)
            if self._unsent:
                selector.register(self._requests, selectors.EVENT_WRITE, self._write)
        if self._output_open:
            selector.register(self._output, selectors.EVENT_READ, self._read_output)

    def kill(self) -> str:
        """Kill the process group, read the rest of its output, and return how the child ended."""
        if self.has_ended:
            self._wait_for_exit()  # its pipe is closed, so it is on its way out: let it say how
        # Before the child is reaped, because its number may then belong to somebody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        code = self._child.wait()
        self._read_output()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            assert pipe is not None
            pipe.close()
        self.has_ended, self._output_open, self.is_ready = True, False, False
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _wait_for_exit(self) -> None:
        """Wait at most a second for the child's exit; a child that closes its pipe and lives on is killed."""
        for _ in range(200):
            if os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.005)

    def _read_replies(self) -> None:
        chunk = _read(self._replies)
        if chunk is None:
            return
        self._partial += chunk
        if b"\n" in chunk:
            *lines, self._partial = self._partial.split(b"\n")
            self._messages.extend(_parse(line) for line in lines)
        self.has_ended = not chunk or len(self._partial) > _MAX_REPLY

    def _read_output(self) -> None:
        chunk = _read(self._output)
        if chunk is None:
            return
        self._tail = (self._tail + chunk)[-_MAX_OUTPUT:]
        self._output_open = bool(chunk)

    def _write(self) -> None:
        try:
            del self._unsent[: os.write(self._requests, self._unsent[:_CHUNK])]
        except BrokenPipeError:
            self._unsent.clear()  # it has died; the end of its replies says so too
        except BlockingIOError:
            return


def _read(pipe_end: int) -> bytes | None:
    """Read the available bytes: b"" at the end, None where there are none yet."""
    try:
        return os.read(pipe_end, _CHUNK)
    except BlockingIOError:
        return None


def _parse(line: bytearray) -> Mapping[str, object]:
    """Parse a reply; empty where the line is not one."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
