"""Termination of this process because of a failure on another rank."""

from __future__ import annotations

import ctypes
import sys
import threading

from rft_core.errors import PeerError


class StoppedByPeer(BaseException):
    """Raised in the main thread where another rank is the reason to end."""


def comes_from_peers(error: BaseException) -> bool:
    """Return whether an error comes from a broken collective, of this package or of a library."""
    if isinstance(error, PeerError):
        return error.problem.code == "collective.failed"
    if not isinstance(error, RuntimeError):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or "gloo/" in str(error)


def raise_in_main(kind: type[BaseException]) -> None:
    """Raise an exception at the next Python instruction of the main thread."""
    main = threading.main_thread().ident
    if main is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(kind))


def flush() -> None:
    """Flush stdout and stderr; a closed stream is ignored."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
