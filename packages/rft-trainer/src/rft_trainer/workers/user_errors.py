"""Errors of a user's code as plain data: one line, the place, and the traceback without frames of this program."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

_OURS = (str(Path(__file__).parent), "<frozen runpy>", "<frozen importlib")
_LIBRARIES = tuple({sys.prefix, sys.base_prefix, "<frozen "})
_LONGEST_LINE = 2000
_LONGEST_TRACEBACK = 6000


def error_line(error: BaseException) -> str:
    """Return kind and message of an error."""
    return traceback.format_exception_only(type(error), error)[-1].strip()[:_LONGEST_LINE]


def error_place(error: BaseException) -> str:
    """Return file:line where the error was raised: in code of the user, where a library that it calls raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, *_OURS))]
    last = own[-1] if own else frames[-1]
    return f"{last.filename}:{last.lineno}"


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first frame of the user's code on; the middle of a long one is cut."""
    text = "".join(_own(error).format()).strip()
    if len(text) <= _LONGEST_TRACEBACK:
        return text
    half = _LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n  ...\n{text[-half:]}"


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error from the first frame of the user's code on."""
    _own(error).print()


def _own(error: BaseException) -> traceback.TracebackException:
    return traceback.TracebackException(type(error), error, _from_user_code(error.__traceback__))


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith((*_OURS, *_LIBRARIES)):
        first = first.tb_next
    return first or trace
