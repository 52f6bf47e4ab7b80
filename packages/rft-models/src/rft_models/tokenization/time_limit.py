"""A call of Python code that is ended after some seconds, or when it takes too much memory, in whatever thread it runs.

One thread watches over all calls; it raises an exception in the thread of one that is late. That reaches code of
Python between two of its steps, such as a template's loop, and no single long operation of the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_LOOK_SECONDS = 0.25
_MOST_BYTES = 1 << 30
"""By which the process may grow while a call that is looked at runs."""
_STATM = "/proc/self/statm"

ResultT = TypeVar("ResultT")


class _OutOfTime(BaseException):
    """Raised in the thread of a call that is late; no `except Exception` of the called code keeps it."""


class _OutOfMemory(BaseException):
    """Raised in the thread of a call during which the process has grown too much."""


@dataclass(slots=True)
class _Call:
    """A call under way."""

    left: float
    """Seconds."""
    began_with: int
    """Bytes of the process."""


class _Watch:
    """The calls under way, by thread; the thread that looks at them ends when there are none.

    Seconds count while it looks: a process that was stopped for a while is not late for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._looks = False

    def begin(self, seconds: float) -> None:
        """Give the calling thread so many seconds."""
        with self._lock:
            # a call that ends before anybody looks at it needs no number
            self._calls[threading.get_ident()] = _Call(seconds, 0)
            if not self._looks:
                self._looks = True
                threading.Thread(target=self._look, name="time-limit", daemon=True).start()

    def end(self) -> None:
        """Forget the calling thread; from here on nothing is raised in it."""
        with self._lock:
            self._calls.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if not self._calls:
                    self._looks = False
                    return
                bytes_now = _resident_bytes()
                for thread, call in list(self._calls.items()):
                    call.left -= _LOOK_SECONDS
                    call.began_with = call.began_with or bytes_now
                    if call.left < 0.0:
                        self._end(thread, _OutOfTime)
                    elif bytes_now - call.began_with > _MOST_BYTES:
                        self._end(thread, _OutOfMemory)

    def _end(self, thread: int, error: type[BaseException]) -> None:
        # once: what it raises would otherwise interrupt the code that handles it
        del self._calls[thread]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_watch = _Watch()


def _resident_bytes() -> int:
    """Return the memory that this process has; 0 where the system does not tell."""
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def call_within(seconds: float, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call.

    Raises:
        TimeoutError: it took longer.
        MemoryError: the process grew by more than a gibibyte meanwhile.
    """
    try:
        _watch.begin(seconds)
        try:
            return call()
        finally:
            _watch.end()
    except _OutOfTime:
        raise TimeoutError(f"longer than {seconds:g} s") from None
    except _OutOfMemory:
        raise MemoryError(f"more than {_MOST_BYTES >> 20} MiB") from None


def _begin_in_child() -> None:
    """Watch anew in a forked child, which has no other thread."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_in_child)
