"""Metrics as (total, count) pairs: adding micro-batches or ranks is exact, and nothing syncs before the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from rft_core.exact_records import exact_bytes, exact_value
from rft_trainer.metrics.memory_growth import memory_metrics
from rft_trainer.protocols import Collectives

Mark = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


class MetricTotals:
    """Accumulator of (total, count) of each name in float64, turned into means once a step."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._changes: dict[str, list[Tensor]] = {}

    def mark(self) -> Mark:
        """Return what is counted so far, for `restore`."""
        return dict(self._pairs), dict(self._peaks), dict(self._sums)

    def restore(self, mark: Mark) -> None:
        """Forget what was counted since `mark`, where a step is taken again."""
        # copies, since the same mark may be restored again; the tensors in them are never changed in place
        self._pairs, self._peaks, self._sums = dict(mark[0]), dict(mark[1]), dict(mark[2])

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add the (total, count) of one micro-batch."""
        for name, (total, count) in pairs.items():
            # stays on the device: a number here would wait for it at every micro-batch
            pair = torch.stack([total.detach().double(), count.detach().double()])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def peak(self, name: str, value: Tensor) -> None:
        """Keep the largest value of a name."""
        value = value.detach().double()
        self._peaks[name] = torch.maximum(self._peaks[name], value) if name in self._peaks else value

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add to a sum that is no metric: its reader takes it at the end of the step."""
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def take_sum(self, name: str) -> Tensor | None:
        """Return a sum of `add_sum`, which begins anew; None where nothing was added."""
        return self._sums.pop(name, None)

    def add_change(self, name: str, change: Tensor | None) -> None:
        """Add how an update changed something.

        `change` is [2]: the sums of squares of the change and of what was there before, this rank's share of both; None
        = there is nothing to measure. Of a step that is taken again, only the update that was applied is added.
        """
        if change is not None:
            self._changes.setdefault(name, []).append(change.detach().double())

    def merged(
        self, collectives: Collectives, *, worked: float | None = None, memory: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Return the mean (or peak) of each name over micro-batches and ranks; names with a count of 0 are left out.

        Exchanged by name, so that a rank that had no micro-batch takes part without knowing the names. With `worked`,
        the seconds that this rank worked and did not wait for others, of several ranks the slowest one too; with
        `memory`, which `MemoryGrowth.take` returned, the rank whose memory grows most.
        """
        own: dict[str, Any] = {
            "pairs": _numbers(self._pairs),
            "peaks": _numbers(self._peaks),
            "changes": {name: torch.stack(each).tolist() for name, each in sorted(self._changes.items())},
            "worked": worked,
            "memory": memory,
        }
        shares = [own]
        if collectives.world_size > 1:
            shares = [exact_value(part) for part in collectives.gather_bytes(exact_bytes(own))]
        totals: dict[str, list[float]] = {}
        peaks: dict[str, float] = {}
        # in the order of ranks, so that every rank adds the same numbers in the same order
        for share in shares:
            for name, (total, count) in share["pairs"].items():
                known = totals.setdefault(name, [0.0, 0.0])
                known[0] += total
                known[1] += count
            for name, value in share["peaks"].items():
                peaks[name] = max(value, peaks.get(name, value))
        means = {name: total / count for name, (total, count) in sorted(totals.items()) if count > 0}
        changes = relative_changes([share["changes"] for share in shares])
        of_ranks = slowest_rank([share["worked"] for share in shares])
        return means | peaks | changes | of_ranks | memory_metrics([share["memory"] for share in shares])


def relative_changes(shares: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, float]:
    """Return the root mean square of a change over that of what was before, added up over the updates of a step.

    `shares` are those of the ranks: (squares of the change, squares before) of each update, by name.
    """
    found: dict[str, float] = {}
    for name in sorted(set().union(*shares)):
        updates = zip(*(share[name] for share in shares if name in share), strict=True)
        sums = [[math.fsum(column) for column in zip(*pairs, strict=True)] for pairs in updates]
        if all(before > 0 for _, before in sums):
            found[name] = sum(math.sqrt(change / before) for change, before in sums)
    return found


def slowest_rank(seconds: Sequence[float | None]) -> dict[str, float]:
    """Return which rank worked longest, and its seconds over the median rank's; empty for one rank.

    The median is the lower one of an even number: of two ranks the ratio is that of the slow one to the fast one.
    """
    known = [own for own in seconds if own is not None]
    if len(known) < max(2, len(seconds)) or (middle := median_low(known)) <= 0:
        return {}
    longest = max(known)
    return {"time/slowest_rank": known.index(longest), "time/slowest_rank_ratio": longest / middle}


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values by name, in the order of names; those of one device are read at once."""
    found: dict[str, Any] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        found |= dict(zip(names, torch.stack([tensors[name] for name in names]).tolist(), strict=True))
    return {name: found[name] for name in sorted(found)}
