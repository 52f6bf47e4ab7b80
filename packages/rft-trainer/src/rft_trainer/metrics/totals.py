"""Metrics as (total, count) pairs: adding micro-batches or ranks is exact, and nothing syncs before the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from rft_core.exact_records import exact_bytes, exact_value
from rft_trainer.protocols import Collectives

Mark = tuple[dict[str, Tensor], dict[str, Tensor]]


class MetricTotals:
    """Accumulator of (total, count) of each name in float64, turned into means once a step."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    def mark(self) -> Mark:
        """Return what is counted so far, for `restore`."""
        return dict(self._pairs), dict(self._peaks)

    def restore(self, mark: Mark) -> None:
        """Forget what was counted since `mark`, where a step is taken again."""
        # copies, since the same mark may be restored again; the tensors in them are never changed in place
        self._pairs, self._peaks = dict(mark[0]), dict(mark[1])

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

    def merged(self, collectives: Collectives, *, worked: float | None = None) -> dict[str, float]:
        """Return the mean (or peak) of each name over micro-batches and ranks; names with a count of 0 are left out.

        Exchanged by name, so that a rank that had no micro-batch takes part without knowing the names. With `worked`,
        the seconds that this rank worked and did not wait for others, of several ranks the slowest one too.
        """
        own: dict[str, Any] = {
            "pairs": _numbers(self._pairs),
            "peaks": _numbers(self._peaks),
            "worked": worked,
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
        return means | peaks | slowest_rank([share["worked"] for share in shares])


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
