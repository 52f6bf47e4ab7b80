"""Memory that grows from step to step on any rank, and the steps until there is none left.

    fifths      f1 ... f5, the means of the memory over each fifth of the last n steps
    growth      f5 - f1, where each fifth lies above the one before by a fair share of it; 0 where one does not
    steps left  memory that is free / (growth of all ranks of that host / (n - n / 5))

An allocation that is kept is one rise, and what fills up by and by (an allocator, a cache) rises less and less; a leak
rises in every part alike. Each rank computes its own growth, so that what the ranks exchange is a few numbers a step.
"""

from __future__ import annotations

import logging
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rft_core.host_memory import free_host_memory, resident_memory

FAST_STEPS, SLOW_STEPS, LONG_STEPS = 50, 200, 1000
"""Steps over which growth is looked for: what ends a run within hours, within days, and within weeks."""
FAST_MIB, SLOW_MIB = 256.0, 16.0
"""Growth of a process over these steps that is reported, the second one over either of the longer windows."""
TRACED_STEPS, TRACED_LONG_STEPS = 10, 100
"""Steps in which a process that grows so much looks for what has grown, once: more where it took the longest window to
see the growth."""
_FAIR, _EVEN = 1 / 8, 1 / 6
"""Part of the growth by which each of the four rises must go up: half of the mean rise, and over many steps two thirds
of it, since what fills up by and by is almost straight in a short window."""
_LOG = logging.getLogger(__name__)
_MIB = 2**20
_KINDS = {
    "growth": FAST_STEPS,
    "slow_growth": SLOW_STEPS,
    "long_growth": LONG_STEPS,
    "device_growth": FAST_STEPS,
}


def fifths(values: Sequence[float]) -> list[float]:
    """Return the means of the fifths of a window, whose rest beyond a multiple of 5 is left out."""
    numbers, size = list(values), len(values) // 5
    return [fmean(numbers[start : start + size]) for start in range(0, 5 * size, size)] if size else []


def steady_growth(values: Sequence[float], share: float = _FAIR) -> float:
    """Return the rise from the first to the last fifth, 0 where a fifth rises by less than this share of it."""
    means = fifths(values)
    grown = means[-1] - means[0] if means else 0.0
    return grown if grown > 0 and min(later - earlier for earlier, later in pairwise(means)) >= grown * share else 0.0


class MemoryGrowth:
    """Growth of the memory of one rank's process, and of its tensors on a GPU.

    Example::

        growth = MemoryGrowth()
        for batch in batches:
            totals.merged(ranks, memory=growth.take())
    """

    def __init__(
        self,
        *,
        resident: Callable[[], int | None] = resident_memory,
        free: Callable[[], int | None] = free_host_memory,
        device: Callable[[], tuple[int, int] | None] | None = None,
        host: str | None = None,
    ) -> None:
        """Begin without a step.

        Args:
            resident: bytes that the process holds; None where the system does not tell.
            free: bytes that processes of this host may still take.
            device: bytes of the tensors on this rank's GPU, and bytes that may still be taken there; None without one.
            host: name of the machine, by which ranks know whose memory they share.
        """
        self._resident, self._free, self._device = resident, free, device or _device_memory
        self._host = platform.node() if host is None else host
        self._resident_mib: deque[float] = deque(maxlen=LONG_STEPS)
        self._device_mib: deque[float] = deque(maxlen=FAST_STEPS)
        self._trace: Any = None
        self._traced, self._steps_to_trace = 0, TRACED_STEPS

    def take(self) -> dict[str, Any]:
        """Look at the memory of this step; return this rank's share of the exchange, in MiB.

        Its growths are absent until the windows are full, and what is free where nothing grows. The first time that one
        is worth a word, what has grown in the steps behind it is written into the log of this rank.
        """
        share: dict[str, Any] = {"host": self._host}
        if (resident := self._resident()) is not None:
            self._resident_mib.append(resident / _MIB)
            share["resident"] = self._resident_mib[-1]
            share |= _growths(list(self._resident_mib))
            if any(share.get(kind) for kind in ("growth", "slow_growth", "long_growth")):
                share["free"] = _mib(self._free())
            self._look_for_sites(share)
        if (found := self._device()) is not None:
            self._device_mib.append(found[0] / _MIB)
            if len(self._device_mib) == FAST_STEPS:
                share["device_growth"] = steady_growth(self._device_mib)
                share["device_free"] = _mib(found[1])
        return share

    def _look_for_sites(self, share: Mapping[str, Any]) -> None:
        """Begin to trace what grows where the growth is worth a word, and tell it some steps later."""
        if self._traced > self._steps_to_trace:
            return
        if self._trace is None:
            is_soon = share.get("growth", 0.0) > FAST_MIB or share.get("slow_growth", 0.0) > SLOW_MIB
            if not is_soon and share.get("long_growth", 0.0) <= SLOW_MIB:
                return
            # what grows so slowly that only the longest window shows it is little in a few steps
            self._steps_to_trace = TRACED_STEPS if is_soon else TRACED_LONG_STEPS
            # here, because the pages of a run use the numbers of this module and do without torch
            from rft_trainer.metrics.growth_trace import GrowthTrace

            self._trace = GrowthTrace()
        elif self._traced == self._steps_to_trace:
            sites = ", ".join(self._trace.finish()) or "no line of Python and no tensors: memory that a library keeps"
            _LOG.warning("the memory of this process grows; in the last %d steps: %s", self._traced, sites)
            self._trace = None
        self._traced += 1


def _growths(resident_mib: Sequence[float]) -> dict[str, float]:
    """Return the growth over each window that is full."""
    found: dict[str, float] = {}
    for kind, window, share in (
        ("growth", FAST_STEPS, _FAIR),
        ("slow_growth", SLOW_STEPS, _EVEN),
        ("long_growth", LONG_STEPS, _EVEN),
    ):
        if len(resident_mib) >= window:
            found[kind] = steady_growth(resident_mib[-window:], share)
    return found


def memory_metrics(shares: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Return the metrics of memory from the shares of all ranks, in their order.

    Of several ranks the largest process (`memory/largest_rss_mib`, `memory/largest_rss_rank`); for each kind of growth
    KIND the largest one (`memory/KIND_mib`) and, where there is one, its rank and the steps until nothing is left.
    """
    known = {rank: share for rank, share in enumerate(shares) if share is not None}
    found: dict[str, float] = {}
    resident = {rank: share["resident"] for rank, share in known.items() if "resident" in share}
    if len(resident) > 1:
        largest = max(resident, key=lambda rank: resident[rank])
        found |= {"memory/largest_rss_mib": resident[largest], "memory/largest_rss_rank": largest}
    for kind, window in _KINDS.items():
        grown = {rank: share[kind] for rank, share in known.items() if kind in share}
        if not grown:
            continue
        worst = max(grown, key=lambda rank: grown[rank])
        found[f"memory/{kind}_mib"] = grown[worst]
        if not grown[worst]:
            continue
        found[f"memory/{kind}_rank"] = worst
        on_device = kind == "device_growth"
        free = known[worst].get("device_free" if on_device else "free")
        if free is not None:
            # ranks of one host take from the same memory; each has a GPU of its own
            beside = [rank for rank in grown if rank == worst or (not on_device and _same_host(known, rank, worst))]
            found[f"memory/{kind}_steps_left"] = free / rate(sum(grown[rank] for rank in beside), window)
    return found


def rate(growth: float, window: int) -> float:
    """Return the growth a step: from the middle of the first fifth to that of the last."""
    return growth / (window - window // 5)


def _same_host(known: Mapping[int, Mapping[str, Any]], one: int, other: int) -> bool:
    return known[one]["host"] == known[other]["host"]


def _mib(number: int | None) -> float | None:
    return None if number is None else number / _MIB


def _device_memory() -> tuple[int, int] | None:
    # here, because the pages of a run use the numbers of this module and do without torch
    import torch

    if not torch.cuda.is_initialized():
        return None
    allocated = torch.cuda.memory_allocated()
    # the driver counts what torch has reserved as taken, yet the next allocation may use it
    return allocated, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
