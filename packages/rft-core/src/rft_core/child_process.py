"""A child process that exchanges lines with its parent over two pipes and is killed with all that it has started.

`ChildProcess` is the parent's side, `ParentPipes` the child's. What a line holds is theirs to say; a typed error
crosses as the fields of `error_fields`.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rft_core import errors
from rft_core.errors import RftError, ServiceError

_CHUNK = 1 << 16  # what a pipe holds
_TAIL = 1 << 13
_LOOK_SECONDS = 0.005
_LONGEST_KILL = 2.0
_MARK = "RFT_CHILD"
"""Variable of a child with the name of another one, by which what the child starts is found."""


class ChildProcess:
    """One child and its pipes, none of which can block this process: bytes move in `wait_for_any` alone.

    It leads a session of its own: a kill reaches what it has started, and Ctrl-C on the terminal reaches the parent
    alone, which then ends the child in order. What has left that session, as a daemon does, is found by a variable of
    its environment, where the system shows those (Linux).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        longest_line: int = sys.maxsize,
        inherited: Mapping[str, str] | None = None,
        output: Callable[[bytes], None] | None = None,
        user: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `command` with the numbers of the two pipes behind it, which the child gives to `ParentPipes`.

        Args:
            command: program and arguments.
            environment: variables beside those that it inherits.
            log: file that takes what the child prints; None = the end of it is `last_output`.
            longest_line: bytes of a line; a child that sends more without an end of line has ended.
            inherited: variables of this process that the child sees; None = all of them.
            output: is given what the child prints, piece by piece, where there is no log.
            user: number of the user and of the only group that it runs as, for a parent that is root; None = as this.
            pass_fds: further descriptors that it inherits.
        """
        self.lines: deque[bytearray] = deque()
        """Lines that have arrived, oldest first; whoever uses one takes it out."""
        self.has_ended = False
        """Whether the child has closed a pipe, sent a line that is too long, or been killed."""
        self._unsent, self._partial, self._tail = bytearray(), bytearray(), b""
        self._longest_line = longest_line
        self._take_output = output
        self._how = ""
        self._mark = f"RFT_CHILD_{secrets.token_hex(8)}"
        given = os.environ if inherited is None else inherited
        to_child, write = os.pipe()
        read, from_child = os.pipe()
        self._requests, self._replies = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb", buffering=0)
        try:
            with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("ab") as stream:
                self._child = subprocess.Popen(
                    [*command, str(to_child), str(from_child)],
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**given, **environment, _MARK: self._mark, self._mark: "1"},
                    pass_fds=(to_child, from_child, *pass_fds),
                    start_new_session=True,
                    user=user,
                    group=user,
                    extra_groups=None if user is None else (),
                )
        finally:
            # the child's ends: held open here, they would hide from this process that the child has gone
            os.close(to_child)
            os.close(from_child)
        self._output = self._child.stdout
        self._pipes = [pipe for pipe in (self._requests, self._replies, self._output) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id, which is the number of its session and process group too."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs and has not been killed from here."""
        if self._child.returncode is not None:
            return False
        try:  # looked at and not reaped: until `kill` its number belongs to nobody else
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        except ChildProcessError:
            return False

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None before `kill` has reaped it."""
        return self._child.returncode

    @property
    def is_sending(self) -> bool:
        """Return whether a part of what was queued is not in the pipe yet."""
        return bool(self._unsent)

    @property
    def last_output(self) -> str:
        """The end of what the child printed; empty with a log."""
        return self._tail.decode(errors="replace")

    def send(self, line: bytes) -> None:
        """Queue a line; it is sent as fast as the child reads."""
        self._unsent += line
        self._unsent += b"\n"

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the events that this process waits for; the data of each is the function to call."""
        if not self.has_ended:
            selector.register(self._replies, selectors.EVENT_READ, self._read_replies)
            if self._unsent:
                selector.register(self._requests, selectors.EVENT_WRITE, self._write)
        if self._output is not None:
            selector.register(self._output, selectors.EVENT_READ, self._read_output)

    def kill(self, grace: float = 0.0) -> str:
        """Kill the process with all that it has started, and return how it ended; a second call changes nothing.

        Args:
            grace: seconds in which it may still end by itself, for one that is on its way out.
        """
        if self._pipes:
            until = time.monotonic() + grace
            while self.is_alive and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            # before the child is reaped, because its number may then belong to somebody else
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._child.wait()
            _kill_marked(self._mark)
            # what it printed last may still be in the pipe
            self._read_output()
            self.has_ended, self._output = True, None
            while self._pipes:
                self._pipes.pop().close()
            self._how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return self._how

    def _read_replies(self) -> None:
        chunk = self._replies.read(_CHUNK)
        if chunk is None:  # nothing there yet
            return
        self._partial += chunk
        # only then: a long line would be searched again from its start with every chunk
        if b"\n" in chunk:
            *lines, self._partial = self._partial.split(b"\n")
            self.lines.extend(lines)
        self.has_ended = not chunk or len(self._partial) > self._longest_line

    def _read_output(self) -> None:
        chunk = None if self._output is None else self._output.read(_CHUNK)
        if chunk is None:
            return
        self._tail = (self._tail + chunk)[-_TAIL:]
        if chunk and self._take_output is not None:
            self._take_output(chunk)
        if not chunk:
            self._output = None

    def _write(self) -> None:
        try:
            # `write` returns None where the pipe is full
            del self._unsent[: self._requests.write(self._unsent[:_CHUNK]) or 0]
        except BrokenPipeError:
            self._unsent.clear()
            self.has_ended = True


def _kill_marked(mark: str) -> None:
    """Kill every process of this user whose environment holds the variable `mark`, also what they start meanwhile."""
    until = time.monotonic() + _LONGEST_KILL
    while found := [pid for pid in _own_processes() if _holds(pid, mark)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # one that the system cannot end now, as in a read of a disk that is gone, is left to it
        if time.monotonic() > until:
            return
        time.sleep(_LOOK_SECONDS)


def _own_processes() -> list[int]:
    """Return the processes of this user, this one left out; none where the system does not list them."""
    user, me = os.getuid(), os.getpid()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if entry.name.isdecimal() and entry.stat().st_uid == user and int(entry.name) != me:
                    found.append(int(entry.name))
    return found


def _holds(pid: int, mark: str) -> bool:
    """Return whether a process began with the variable; one that has ended has none."""
    try:
        return f"{mark}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def wait_for_any(children: Iterable[ChildProcess], seconds: float) -> bool:
    """Wait until bytes have moved to or from a child, or `seconds` (may be infinite); return whether they have."""
    # poll takes file numbers above 1023, which select does not, and needs no descriptor as epoll does
    with selectors.PollSelector() as selector:
        for child in children:
            child.register(selector)
        events = selector.select(None if seconds == math.inf else seconds)
        for key, _ in events:
            key.data()
    return bool(events)


class ParentPipes:
    """The child's side of the two pipes; what it prints and reads otherwise does not reach them."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        # what the child starts must not hold the pipes open after it
        for descriptor in (read_fd, write_fd):
            os.set_inheritable(descriptor, False)
        self.requests = os.fdopen(read_fd, "rb")
        """Lines of the parent, until it closes its side."""
        self._replies = write_fd

    def send(self, line: bytes) -> None:
        """Send a line; waits while the pipe is full."""
        view = memoryview(line + b"\n")
        while view:
            view = view[os.write(self._replies, view) :]


def kill_descendants() -> None:
    """Kill what this child process has started, daemons included: for one whose parent has gone and kills nothing."""
    if mark := os.environ.get(_MARK):
        _kill_marked(mark)


def error_fields(error: RftError) -> dict[str, str]:
    """Return a typed error as JSON, for the child's side."""
    return {"kind": type(error).__name__, **asdict(error.problem)}


def error_of(fields: Mapping[str, str]) -> RftError:
    """Return the error of these fields again, a `ServiceError` where its class is not one of `rft_core.errors`."""
    kinds = {kind.__name__: kind for kind in RftError.__subclasses__() if kind.__module__ == errors.__name__}
    problem = dict(fields)
    return kinds.get(problem.pop("kind"), ServiceError)(**problem)
