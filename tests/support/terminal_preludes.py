"""What a child does to its own terminal and to itself: the reader of its output goes, signals come in a storm."""

from __future__ import annotations

import os
import pty
import signal
import time


def close_output(kind: str) -> None:
    """Have stdout and stderr be a pipe that nobody reads, or a file on a full disk."""
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writing, 1)
    os.dup2(writing, 2)


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


def storm(seconds: float) -> None:
    """Have another process send SIGTERM to this one a thousand times a second, from now on until it has ended."""
    target = os.getpid()
    os.kill(target, signal.SIGTERM)
    if os.fork() == 0:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                os.kill(target, signal.SIGTERM)
            except ProcessLookupError:
                break
            time.sleep(0.001)
        os._exit(0)
