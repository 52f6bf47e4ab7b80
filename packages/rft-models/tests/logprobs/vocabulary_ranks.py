"""Ranks that share one vocabulary, as threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


class Ranks:
    """Threads that meet in sums and maxima, and count the numbers they exchange."""

    def __init__(self, rank: int, shared: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(shared)
        self.numbers = 0
        self._shared, self._barrier = shared, barrier

    def sum(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return self._together(tensor, lambda all_: all_.sum(0))

    def max(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return self._together(tensor, lambda all_: all_.amax(0))

    def _together(self, tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        self.numbers += tensor.numel()
        self._shared[self.rank] = tensor
        self._barrier.wait(30)
        result = reduce(torch.stack([x for x in self._shared if x is not None]))
        self._barrier.wait(30)
        return result


def on_ranks(bounds: Sequence[int], task: Callable[[Ranks, int, int], Found]) -> list[Found]:
    """What `task(ranks, first row, end)` gives on each rank; rank r has the rows bounds[r] .. bounds[r + 1] - 1."""
    cuts = list(pairwise(bounds))
    shared: list[Tensor | None] = [None] * len(cuts)
    barrier = threading.Barrier(len(cuts))
    results: list[Any] = [None] * len(cuts)

    def run(rank: int) -> None:
        try:
            results[rank] = task(Ranks(rank, shared, barrier), *cuts[rank])
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
