"""Stacks of all threads of a run that goes on, on request: SIGUSR2 lets each rank write them into a file of its own.

A thread of its own writes them, with the interpreter's lock: also while the main thread is inside of a call that does
not return, as an exchange between ranks is, unless that call keeps the lock. (`faulthandler` needs no lock, reads the
frames of threads that run meanwhile, and has so ended runs by SIGSEGV.) The system call that the signal interrupts is
restarted, so that the run goes on as if nothing had been. SIGUSR1 is taken: it saves and stops. No torch is imported
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from rft_dist.health.process_state import GONE, process_state, this_machine

SIGNAL = signal.SIGUSR2
_FILES = "stacks_rank_*.txt"
_PROCESS = "process "
"""What the line begins with that says which process writes the stacks behind it."""
_ENDED = "process ended"
_OPEN: list[TextIO] = []
"""The file that the handler of this process writes into."""
_ANSWERING: list[int] = []
"""The number of the process whose thread answers; that of a parent after a fork, which takes no thread along."""
_KEPT: list[socket.socket] = []
"""What the signals are written to."""
_POLL, _STILL = 0.05, 0.25
"""Seconds between two looks at a file, and without a new line after which it is complete."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process that writes the stacks of a rank."""

    rank: int
    pid: int
    host: str
    machine: str
    """As of `process_state.this_machine`."""
    started: str
    """When the process began, as the system counts; no later process of this number began then."""
    main_thread: str

    @property
    def is_alive(self) -> bool:
        """Return whether the process is still there, on this machine."""
        return process_state(self.pid) != GONE and _started(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class RankStacks:
    """The stacks of a rank, or why there are none."""

    rank: int
    file: Path
    text: str = ""
    """Of all threads, innermost line first."""
    main: tuple[str, ...] = ()
    """Lines of the main thread."""
    missing: str = ""

    @property
    def num_threads(self) -> int:
        """Return the number of threads."""
        return len(re.findall(r"^(?:Current thread|Thread) 0x", self.text, re.M))


class StackDumps:
    """The stacks of this rank, on SIGUSR2 from the moment on at which the run has its folder."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._logs: Path | None = None
        self._file: TextIO | None = None
        self._closed = False

    def attach(self, run: Path) -> None:
        """Set the run's folder; its logs/ may not exist yet."""
        self._logs = run / "logs"
        self.open()

    def open(self) -> None:
        """Answer from now on, if the folder is there and nobody else handles the signal."""
        if self._file is not None or self._closed or self._logs is None or not self._logs.is_dir():
            return
        if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, _noted) or not _answers_signals():
            self._closed = True  # a program of the user's own, which handles signals or runs this in a thread
            return
        with contextlib.suppress(OSError):  # a run that cannot write this file goes on without it
            self._file = (self._logs / f"stacks_rank_{self._rank}.txt").open("a", encoding="utf-8", buffering=1)
            while _OPEN:
                _OPEN.pop().close()  # of a run that this process made before
            _OPEN.append(self._file)
            self._file.write(f"{_PROCESS}{json.dumps(asdict(_this_process(self._rank)))}\n")

    def close(self) -> None:
        """Say that the run has ended; safe to call twice.

        The handler stays: a signal that was sent a moment before would end the process, and with it its exit code.
        """
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(f"{_ENDED}\n")
            self._file = None


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread that reads the numbers of signals answers."""


def _answers_signals() -> bool:
    """Let a thread answer the signal from now on; return False where this process has another use for signals."""
    if [os.getpid()] == _ANSWERING:
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1 and not _ANSWERING:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        return False
    _ANSWERING[:] = [os.getpid()]
    _KEPT.append(writer)
    threading.Thread(target=_answer_signals, args=(reader,), name="stacks", daemon=True).start()
    # a handler before the line that tells others to send the signal, which ends a process without one
    signal.signal(SIGNAL, _noted)
    signal.siginterrupt(SIGNAL, False)
    return True


def _answer_signals(reader: socket.socket) -> None:
    while numbers := reader.recv(64):
        for number in numbers:
            if number == SIGNAL and _OPEN:
                with contextlib.suppress(OSError, ValueError):  # a file that was closed meanwhile
                    os.write(_OPEN[-1].fileno(), _stacks().encode())


def _stacks() -> str:
    """Return the stacks of all threads but this one as `faulthandler` writes them, those of the main thread last."""
    main = threading.main_thread().ident
    now = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frames = {ident: frame for ident, frame in now.items() if ident != threading.get_ident()}
    texts: list[str] = []
    for ident in sorted(frames, key=lambda one: one == main):
        lines = [f"{'Current thread' if ident == main else 'Thread'} 0x{ident:016x} (most recent call first):"]
        frame: FrameType | None = frames[ident]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        texts.append("\n".join(lines) + "\n")
    return "\n".join(texts)


def request_stacks(run: Path, *, patience: float = 10.0) -> Iterator[RankStacks]:
    """Let each rank of a run write its stacks, and yield them in the order of the ranks.

    Args:
        run: directory of the run.
        patience: seconds that a rank gets.
    """
    files = sorted((run / "logs").glob(_FILES), key=_rank_of)
    asked = [(file, *_ask(file)) for file in files]
    for file, process, missing, begin in asked:
        if process is None:
            yield RankStacks(_rank_of(file), file, missing=missing)
        else:
            yield _answer(file, process, begin, patience)


def _rank_of(file: Path) -> int:
    digits = re.sub(r"\D", "", file.stem)
    return int(digits) if digits else 0


def _ask(file: Path) -> tuple[RankProcess | None, str, int]:
    """Send the signal; (the process, "", where its answer begins), or (None, why not, 0)."""
    process = last_process(file)
    if process is None:
        return None, "its process has ended", 0
    if process.machine != this_machine():
        return None, f"it runs on {process.host}: rft-train runs stacks there", 0
    if not process.is_alive:
        return None, f"its process {process.pid} is gone", 0
    line = f"\n== {time.strftime('%Y-%m-%d %H:%M:%S')} asked for\n".encode()
    handle = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(handle, line)
        begin = os.fstat(handle).st_size
    finally:
        os.close(handle)
    os.kill(process.pid, SIGNAL)
    return process, "", begin


def last_process(file: Path) -> RankProcess | None:
    """Return the process that writes into a file of stacks; None where it has ended in order or there is none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        if line == _ENDED:
            return None
        if line.startswith(_PROCESS):
            return RankProcess(**json.loads(line.removeprefix(_PROCESS)))
    return None


def _answer(file: Path, process: RankProcess, begin: int, patience: float) -> RankStacks:
    """Wait until the stacks stand in the file: the main thread's are the last, and nothing more comes."""
    text, since = "", time.monotonic()
    until = since + patience
    while time.monotonic() < until:
        with file.open("rb") as opened:
            opened.seek(begin)
            now = opened.read().decode(errors="replace")
        if now != text:
            text, since = now, time.monotonic()
        elif _main_lines(text, process) and time.monotonic() - since >= _STILL:
            break
        time.sleep(_POLL)
    main = _main_lines(text, process)
    return RankStacks(process.rank, file, text, tuple(main), "" if main else f"no answer within {patience:g} s")


def _main_lines(text: str, process: RankProcess) -> list[str]:
    """Return the lines of the main thread, innermost first."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(("Current thread 0x", "Thread 0x")):
            inside = process.main_thread in line
        elif inside and line.startswith("  "):
            found.append(line.strip())
    return found


def _this_process(rank: int) -> RankProcess:
    pid, main = os.getpid(), threading.main_thread().ident or 0
    # as faulthandler writes it
    return RankProcess(rank, pid, socket.gethostname(), this_machine(), _started(pid), f"0x{main:016x}")


def _started(pid: int) -> str:
    """Return the start of a process in ticks since the boot; empty where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # behind the name, which may hold spaces and brackets; the 22nd field of all
    return text.rpartition(")")[2].split()[19]


def main_thread_lines(stacks: RankStacks, most: int) -> Sequence[str]:
    """Return the innermost lines of the main thread, and how many more there are."""
    more = len(stacks.main) - most
    return [*stacks.main[:most], *([f"... {more} more"] if more > 0 else [])]
