"""A call of Python code that is ended after some seconds, in whatever thread it runs.

One thread watches over all calls; it raises an exception in the thread of one that is late. That reaches code of
Python between two of its steps, such as a template's loop, and no single long operation of the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 0.25

ResultT = TypeVar("ResultT")


class _OutOfTime(BaseException):
    """Raised in the thread of a call that is late; no `except Exception` of the called code keeps it."""


class _Watch:
    """Seconds left to the calls under way, by thread; the thread that looks at them ends when there are none.

    Seconds count while it looks: a process that was stopped for a while is not late for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, float] = {}
        self._looks = False

    def begin(self, seconds: float) -> None:
        """Give the calling thread so many seconds."""
        with self._lock:
            self._left[threading.get_ident()] = seconds
            if not self._looks:
                self._looks = True
                threading.Thread(target=self._look, name="time-limit", daemon=True).start()

    def end(self) -> None:
        """Forget the calling thread; from here on nothing is raised in it."""
        with self._lock:
            self._left.pop(threading.get_ident(), None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if not self._left:
                    self._looks = False
                    return
                self._left = {thread: seconds - _LOOK_SECONDS for thread, seconds in self._left.items()}
                for thread in [thread for thread, seconds in self._left.items() if seconds < 0.0]:
                    # once: what it raises would otherwise interrupt the code that handles it
                    del self._left[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OutOfTime))


_watch = _Watch()


def call_within(seconds: float, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call.

    Raises:
        TimeoutError: it took longer.
    """
    try:
        _watch.begin(seconds)
        try:
            return call()
        finally:
            _watch.end()
    except _OutOfTime:
        raise TimeoutError(f"longer than {seconds:g} s") from None


def _begin_in_child() -> None:
    """Watch anew in a forked child, which has no other thread."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_in_child)
