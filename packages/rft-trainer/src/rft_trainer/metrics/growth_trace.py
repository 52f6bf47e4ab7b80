"""Tell what has grown in a process whose memory rises: lines of Python that allocated it, and tensors by shape.

Between two instants some steps apart. Python's own allocations are traced meanwhile, which makes it slower; tensors are
counted at both. What libraries keep in memory of their own is seen by neither.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable

import torch

_MIB = 2**20
_MOST = 3
"""Lines or groups of tensors that are reported."""
_LEAST = _MIB // 4
"""Bytes of growth below which a line or a group is left out."""


class GrowthTrace:
    """The growth between its making and `finish`.

    Example::

        trace = GrowthTrace()
        for batch in batches:
            train_on(batch)
        trace.finish()      # ("80 MiB at /home/me/loss.py:12", "5.2 MiB in 10 tensors float32 [128, 1024]")
    """

    def __init__(self) -> None:
        """Count what is there, and trace what comes; a trace that somebody else has begun goes on."""
        self._tensors = _tensor_bytes()
        # a run may end before the trace does, in a process that goes on
        self._stop: Callable[[], object] = lambda: None
        if not tracemalloc.is_tracing():
            tracemalloc.start()
            self._stop = weakref.finalize(self, tracemalloc.stop)
        self._before = _line_bytes()

    def finish(self) -> tuple[str, ...]:
        """Return what has grown most, the largest first; nothing where no growth was seen."""
        lines = _line_bytes() - self._before
        self._stop()
        now = _tensor_bytes()
        grown = {f"at {line}": number for line, number in lines.items()}
        for (kind, size), number in (now - self._tensors).items():
            grown[f"in {number} tensors {kind}"] = number * size
        largest = sorted(grown, key=lambda where: grown[where], reverse=True)[:_MOST]
        return tuple(f"{grown[where] / _MIB:.3g} MiB {where}" for where in largest if grown[where] >= _LEAST)


def _line_bytes() -> Counter[str]:
    """Return the bytes that each line of Python has allocated since the trace began, and that are still there."""
    found = Counter[str]()
    for statistic in tracemalloc.take_snapshot().statistics("lineno"):
        frame = statistic.traceback[0]
        if frame.filename in (__file__, tracemalloc.__file__):
            continue  # what the trace itself takes
        found[f"{frame.filename}:{frame.lineno}"] = statistic.size
    return found


def _tensor_bytes() -> Counter[tuple[str, int]]:
    """Return the number of storages by (type and shape of a tensor on it, bytes), each storage once."""
    found, seen = Counter[tuple[str, int]](), set[int]()
    for one in gc.get_objects():
        # by the type itself: an object that stands for another one may do anything when it is asked for its class
        if type(one) not in (torch.Tensor, torch.nn.Parameter) or one.layout != torch.strided:
            continue
        storage = one.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kind = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
            found[kind, storage.nbytes()] += 1
    return found
