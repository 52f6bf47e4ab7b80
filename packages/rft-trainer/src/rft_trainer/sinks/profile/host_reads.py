"""Places where the host reads the values of tensors: there it waits for a GPU to finish what it was given.

On a GPU torch itself tells of each operation that waits. On a CPU nothing waits, so the calls are counted that would:
all of them, also those on tensors that a GPU run keeps on the host.
"""

from __future__ import annotations

import functools
import linecache
import sys
import threading
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

ON_CPU = "calls that read the values of tensors; on a GPU those on its tensors would wait"
ON_GPU = "operations for which torch waited for the GPU"
_OF_TENSORS = ("item", "tolist", "numpy", "cpu")
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__")
_OF_BOTH = ("is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive")
"""Methods, and functions of torch, whose result the host needs, or whose shape depends on values."""
_OF_TORCH = str(Path(torch.__file__).parent)
_HERE = __file__
_WAITED = "called a synchronizing CUDA operation"


@dataclass(frozen=True, slots=True)
class ReadPlace:
    """A line that reads values of tensors."""

    place: str
    """File, line and function."""
    code: str
    count: int


class ReadCounter(Protocol):
    """Counts reads while it is open."""

    how: str
    """What it counts."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def places(self) -> list[ReadPlace]:
        """Return the places, those with the most reads first."""
        ...


def read_counter(device: str) -> ReadCounter:
    """Return the counter of a device."""
    return SyncWarnings() if device.startswith("cuda") else ReadCalls()


class ReadCalls:
    """Counts the calls of this process that read values, where no device would tell of them.

    The functions themselves are replaced while it is open: a mode of torch would not see backward passes. An index by a
    mask is not seen.
    """

    how = ON_CPU

    def __init__(self) -> None:
        self._frames: Counter[tuple[str, int, str]] = Counter()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._inside = threading.local()

    def open(self) -> None:
        """Count from now on."""
        # not `__getitem__`, an index by a mask: once it was replaced, torch takes every tensor for a sequence for good
        for name in (*_OF_TENSORS, *_CONVERSIONS, *_OF_BOTH):
            self._replace(torch.Tensor, name)
        for name in _OF_BOTH:
            self._replace(torch, name)

    def close(self) -> None:
        """Stop counting, and put the functions back."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is None:
                delattr(owner, name)  # it is inherited
            else:
                setattr(owner, name, own)

    def places(self) -> list[ReadPlace]:
        """Return the places, those with the most reads first."""
        return _places(self._frames)

    def _replace(self, owner: Any, name: str) -> None:
        function, inside, frames = getattr(owner, name), self._inside, self._frames

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            # one that is made of others counts once
            if getattr(inside, "on", False):
                return function(*arguments, **named)
            frames[_place(sys._getframe(1))] += 1
            inside.on = True
            try:
                return function(*arguments, **named)
            finally:
                inside.on = False

        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, counted)


class SyncWarnings:
    """Counts the warnings that torch gives where an operation waits for the GPU."""

    how = ON_GPU

    def __init__(self) -> None:
        self._frames: Counter[tuple[str, int, str]] = Counter()
        self._caught = warnings.catch_warnings()

    def open(self) -> None:
        """Let torch warn, and keep its warnings from the terminal."""
        self._caught.__enter__()
        warnings.filterwarnings("always", message=f".*{_WAITED}")
        show = warnings.showwarning

        def note(message: Any, *rest: Any, **named: Any) -> None:
            if _WAITED in str(message):
                self._frames[_place(sys._getframe(1))] += 1
            else:
                show(message, *rest, **named)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        """Let torch be silent again."""
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)

    def places(self) -> list[ReadPlace]:
        """Return the places, those with the most reads first."""
        return _places(self._frames)


def _place(frame: FrameType | None) -> tuple[str, int, str]:
    """Return file, line and function of the first frame that is none of torch, warnings or this file."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OF_TORCH, "<")) and file != _HERE and not file.endswith("/warnings.py"):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "unknown", 0, ""


def _places(frames: Counter[tuple[str, int, str]]) -> list[ReadPlace]:
    ordered = sorted(frames.items(), key=lambda item: (-item[1], item[0]))
    return [
        ReadPlace(f"{_short(file)}:{line} ({function})", linecache.getline(file, line).strip(), count)
        for (file, line, function), count in ordered
    ]


def _short(file: str) -> str:
    """Return a path from the package on."""
    for mark in ("/src/", "/site-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    return "/".join(file.split("/")[-2:])
