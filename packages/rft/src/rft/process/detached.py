"""A run without its terminal: it goes on when nobody reads its output any more, and keeps its exit code.

For the process of a command. A library's caller has streams and signal handlers of its own, which stay.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from rft.process import garbage_collection

INTERRUPTED = 130
"""Exit code of an end at once by a signal: before there was anything to save, or by a second Ctrl-C."""
_STDERR = 2


class LastingStream:
    """A text stream whose readers may go away: after the first write that fails, what is written is dropped.

    A closed pipe, a terminal that hung up and a full disk are no reason to end a run, whose records are in its
    directory.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """Why what is written goes nowhere; None while it is written."""

    def write(self, text: str) -> int:
        """Write the text, or drop it; returns its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        self.error = error
        # the file itself, since the interpreter writes what is left in its buffer when it ends, and a child process
        # that has inherited the file may still write to it
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_streams() -> None:
    """Have standard input, output and error be open files, as a program started with `>&-` does not.

    Called before any other file is opened: it would get the number of the closed stream, and what is printed would be
    written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    # Python has no stream for a file that was closed when it started
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115


class _State:
    begun = False


@contextmanager
def outliving_terminal(*, for_good: bool) -> Generator[None]:
    """Have this process, and the ones that it starts, go on without a terminal, and end once by a signal.

    SIGHUP is ignored. Until `run_has_begun`, SIGTERM and SIGUSR1 end the process with `INTERRUPTED` and a line, also
    while modules are imported; afterwards the run's own handlers save and end it, and a signal that comes when they are
    gone again finds a process on its way to the exit code of the save: it is ignored. With `for_good` nothing is put
    back at the end of the block, for a process that ends with it. In any other thread than the main one, which alone
    may handle signals, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.begun = False
    streams = sys.stdout, sys.stderr
    handlers = {number: signal.signal(number, _on_signal) for number in (signal.SIGTERM, signal.SIGUSR1)}
    handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit this one
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
    try:
        yield
    finally:
        if not for_good:
            sys.stdout, sys.stderr = streams
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run_has_begun() -> None:
    """Note that from here on a stop signal is the run's affair; its start is over, and garbage is collected again."""
    _State.begun = True
    garbage_collection.go_on()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _State.begun:
        return
    line = f"stopped by {signal.Signals(number).name} before the run began; the same command starts it again\n"
    with suppress(OSError):
        os.write(_STDERR, line.encode())
    # at once: an exception would pass through whatever module is just being imported, which may catch it
    os._exit(INTERRUPTED)
