"""The cage: a submitted program in bubblewrap, with a deadline, and nothing of it left afterwards.

Inside, in namespaces of their own for users, processes, network, IPC, host name and control groups, there are a copy
of the interpreter, read-only, three devices, and a small /tmp; no /proc, no home, no variable of the environment.
Limits of the kernel (`cage_main`) and a filter of its calls (`system_calls`) stand beside that. Whether a result is
right is found out outside.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rft_core.child_process import ChildProcess, wait_for_any
from rft_trainer.sandbox.interpreter import CagedPython
from rft_trainer.sandbox.system_calls import filter_program

NOBODY = 65534
"""The user inside, and outside where root starts it: root's processes are not counted by a limit of processes."""
_MIB = 1 << 20
_MAX_REPLIES = 4 * _MIB
_MORE_LINES = 64  # of a program that writes where the replies go
_NUM_FILES = 64
_NUM_PROCESSES = 32
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_KILLED, _CPU_TIME = 128 + 9, 128 + 24
_EXIT_GRACE = 1.0
_LONGEST_WAIT = 4.0  # times the time of a run
_SHORTEST_WAIT = 0.05
_SHOWN = 500
_PROGRAM = Path(__file__).with_name("cage_main.py")


@dataclass(frozen=True, slots=True)
class CageLimits:
    """Limits of one run in the cage.

    Example::

        CageLimits(cpu_seconds=5, memory_bytes=512 << 20, wall_seconds=10.0)
    """

    cpu_seconds: int
    """Processor time of all tests together."""
    memory_bytes: int
    """Address space."""
    wall_seconds: float
    """Time by the clock, the start of the cage included, in which it had a processor or asked for none; a machine that
    gives it none for longer than three times that ends it too."""
    temporary_bytes: int = 16 * _MIB
    """All that it may keep in /tmp, and the longest output of one test."""


class CageEnd(StrEnum):
    """Why a run in the cage ended."""

    DONE = "done"
    """The program inside went through every test."""
    PROGRAM = "program"
    """The submitted program ended it: a limit, a crash, a flood."""
    LATE = "late"
    """It was not over in time, and the machine gave it less processor time than it asked for."""
    BROKEN = "broken"
    """The cage did not come up, or the system ended it."""


@dataclass(slots=True)
class CageRun:
    """Results of one run in the cage."""

    replies: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """The first reply to each test, unchecked: what the submitted program claims."""
    end: CageEnd = CageEnd.BROKEN
    reason: str = ""
    """What ended it before the last test; empty otherwise."""


class Cage:
    """One run: a child process that is bubblewrap, the submitted program inside it."""

    def __init__(
        self, python: CagedPython, limits: CageLimits, program: str, tests: Sequence[Mapping[str, Any]]
    ) -> None:
        """Start it; `tests` are inputs as `cage_main` takes them, without any expected value."""
        self._limits, self._num_tests = limits, len(tests)
        self._nonce = secrets.token_hex(16)
        self._begin = time.monotonic()
        self.deadline = self._begin + limits.wall_seconds
        """Moment, by `time.monotonic`, at which it is looked at whether it is late."""
        self._num_bytes, self._num_lines = 0, 0
        self._ready, self._ooms = False, _out_of_memory_kills()
        self.run = CageRun()
        filter_fd = _in_memory(filter_program())
        try:
            self.child = ChildProcess(
                [*cage_command(python, limits, filter_fd), "-c", _PROGRAM.read_text(encoding="utf-8")],
                {},
                longest_line=_MAX_REPLIES,
                inherited={},
                user=NOBODY if os.getuid() == 0 else None,
                pass_fds=(filter_fd,),
            )
        finally:
            os.close(filter_fd)
        request = {
            "nonce": self._nonce,
            "program": program,
            "tests": list(tests),
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.temporary_bytes,
            "num_files": _NUM_FILES,
            "num_processes": _NUM_PROCESSES,
        }
        self.child.send(json.dumps(request).encode())

    def has_ended(self) -> bool:
        """Take in what has arrived, and return whether the run is over; it is killed then."""
        self._take()
        closed = self.child.has_ended
        late = "" if closed or self._is_flood else self._lateness()
        if not (closed or self._is_flood or late):
            return False
        self.child.kill(_EXIT_GRACE if closed else 0.0)
        self._take()
        if late:
            self._end(CageEnd(late), f"not over after {time.monotonic() - self._begin:.0f} s")
        elif self._is_flood:
            self._end(CageEnd.PROGRAM, "more results than tests have")
        else:
            self._end(*self._reason_of_the_end())
        return True

    def close(self) -> None:
        """Kill it, whatever it does."""
        self.child.kill()

    @property
    def _is_flood(self) -> bool:
        return self._num_bytes > _MAX_REPLIES or self._num_lines > self._num_tests + _MORE_LINES

    def _take(self) -> None:
        while self.child.lines and not self._is_flood:
            line = self.child.lines.popleft()
            self._num_bytes += len(line)
            self._num_lines += 1
            reply = _reply(line, self._nonce)
            self._ready = self._ready or reply.get("ready") is True
            index = reply.get("test")
            if self._ready and isinstance(index, int) and 0 <= index < self._num_tests:
                self.run.replies.setdefault(index, reply)

    def _lateness(self) -> str:
        """Return whose fault it is that the run is late; empty where it is not, or gets time that it had to wait."""
        now, seconds = time.monotonic(), self._limits.wall_seconds
        if now < self.deadline:
            return ""
        waited = _seconds_waited(self.child.pid)
        own = now - self._begin - (waited or 0.0)
        if self._ready and waited is not None and own >= seconds:
            return CageEnd.PROGRAM
        self.deadline = min(now + max(seconds - own, _SHORTEST_WAIT), self._begin + _LONGEST_WAIT * seconds)
        return CageEnd.LATE if waited is None or now >= self.deadline else ""

    def _reason_of_the_end(self) -> tuple[CageEnd, str]:
        """Return who ended a run that is over by itself, and why: the program, the system, or neither."""
        code = self.child.exit_code
        if not self._ready:
            words = self.child.last_output.strip()[-_SHOWN:]
            return CageEnd.BROKEN, words or f"bubblewrap ended with exit code {code}"
        if len(self.run.replies) == self._num_tests:
            return CageEnd.DONE, ""
        if code == _KILLED and _out_of_memory_kills() > self._ooms:
            return CageEnd.BROKEN, "the system ran out of memory"
        return CageEnd.PROGRAM, _how_it_ended(code, self._limits)

    def _end(self, end: CageEnd, reason: str) -> None:
        self.run.end, self.run.reason = end, reason


def run_cages(
    python: CagedPython, work: Sequence[tuple[CageLimits, str, Sequence[Mapping[str, Any]]]], *, at_once: int
) -> list[CageRun]:
    """Run each (limits, program, inputs) in a cage of its own, `at_once` of them beside one another, in order."""
    waiting: Iterator[tuple[int, tuple[CageLimits, str, Sequence[Mapping[str, Any]]]]] = iter(enumerate(work))
    runs: dict[int, CageRun] = {}
    active: dict[int, Cage] = {}
    try:
        while len(runs) < len(work):
            while len(active) < at_once and (following := next(waiting, None)) is not None:
                index, (limits, program, tests) = following
                active[index] = Cage(python, limits, program, tests)
            seconds = min(cage.deadline for cage in active.values()) - time.monotonic()
            wait_for_any([cage.child for cage in active.values()], max(0.0, seconds))
            for index in [index for index, cage in active.items() if cage.has_ended()]:
                runs[index] = active.pop(index).run
    finally:
        for cage in active.values():
            cage.close()
    return [runs[index] for index in range(len(work))]


def cage_command(python: CagedPython, limits: CageLimits, filter_fd: int) -> list[str]:
    """Return the command line up to Python's own arguments."""
    bwrap = shutil.which("bwrap") or "bwrap"
    command = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--hostname", "cage", "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"]
    # a fixed seed of hashes gives the same order of sets in every run
    for name, value in (("LD_LIBRARY_PATH", "/python/lib"), ("PYTHONHASHSEED", "0"), ("MALLOC_ARENA_MAX", "1")):
        command += ["--setenv", name, value]
    command += ["--ro-bind", str(python.directory), "/python"]
    command += ["--ro-bind", str(python.directory / "lib" / "loader"), python.loader]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--size", str(limits.temporary_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    command += ["--seccomp", str(filter_fd), "--", "/python/bin/python3", "-s", "-S", "-P", "-B"]
    return command


def _in_memory(content: bytes) -> int:
    """Return a descriptor that reads `content`."""
    descriptor = os.memfd_create("rft-cage")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _reply(line: bytearray, nonce: str) -> Mapping[str, Any]:
    """Parse a line of the cage; empty where it is none."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) and reply.get("nonce") == nonce else {}


def _how_it_ended(code: int | None, limits: CageLimits) -> str:
    if code in (_KILLED, _CPU_TIME):
        return f"ended by the limit of {limits.cpu_seconds} s of processor time, or by itself"
    if code is not None and code > 128:
        return f"the program died of signal {code - 128}"
    return "the program ended itself"


def _seconds_waited(bwrap: int) -> float | None:
    """Return for how long the caged program was ready to run and had no processor; None where nothing tells."""
    with suppress(OSError, ValueError, IndexError):
        process = bwrap
        # bubblewrap, its first process in the cage, and Python
        for _ in range(2):
            process = int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return None


def _out_of_memory_kills() -> int:
    """Return how many processes the system has ended for want of memory; 0 where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
