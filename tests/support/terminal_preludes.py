"""What a child does to its own terminal and to itself: the reader of its output goes, signals come in a storm."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Sequence


def close_output(kind: str, streams: Sequence[int] = (1, 2)) -> None:
    """Have stdout and stderr, or one of them, be a pipe that nobody reads, a file on a full disk, or not there."""
    if kind == "nothing":
        for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
            os.close(number)
            setattr(sys, name, None)  # as Python does where it finds them closed
        return
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    for number in streams:
        os.dup2(writing, number)


def pipe() -> int:
    """Have stdout and stderr be a pipe; return its other end, whose closing takes the reader away."""
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    return reading


def terminal() -> int:
    """Have stdout and stderr be a terminal; return its other end, which hangs it up when it is closed."""
    other_end, own_end = pty.openpty()
    os.dup2(own_end, 1)
    os.dup2(own_end, 2)
    os.close(own_end)
    return other_end


def hang_up(other_end: int) -> None:
    """Close the terminal, and send what a shell sends to what runs in it."""
    os.close(other_end)
    os.kill(os.getpid(), signal.SIGHUP)


def storm(seconds: float, name: str = "SIGTERM") -> None:
    """Have another process send a signal to this one a thousand times a second, from now on until it has ended."""
    target, number = os.getpid(), signal.Signals[name]
    os.kill(target, number)
    if os.fork() == 0:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                os.kill(target, number)
            except ProcessLookupError:
                break
            time.sleep(0.001)
        os._exit(0)
