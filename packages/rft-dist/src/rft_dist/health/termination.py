"""How this process ends for the sake of another one."""

from __future__ import annotations

import ctypes
import sys
import threading

from rft_core.errors import PeerError


class StoppedByPeer(BaseException):
    """Raised in the main thread where another rank is the reason to end."""


def comes_from_peers(error: BaseException) -> bool:
    """Whether this is what a broken collective raises, ours or that of a library."""
    if isinstance(error, PeerError):
        return error.problem.code == "collective.failed"
    if not isinstance(error, RuntimeError):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or "gloo/" in str(error)


def raise_in_main(kind: type[BaseException]) -> None:
    """At the next instruction of Python in the main thread."""
    main = threading.main_thread().ident
    if main is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))


def flush() -> None:
    """Whatever was printed is out; a stream that is closed ends nothing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
