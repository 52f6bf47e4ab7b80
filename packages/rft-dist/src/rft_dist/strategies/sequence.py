"""Ranks that share the tokens of a sequence: trades of tokens for heads, with their gradients (Ulysses).

Ranks r S .. r S + S - 1 share the samples of data rank r. What a rank sends in one trade is
T H D / S numbers of which 1 / S stay: each of four trades a layer moves less, the more ranks there are
(arXiv 2309.14509, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft_algos.errors import OptionsError
from rft_dist.collectives import Collectives


class SequenceGroup:
    """The ranks that share rows with this one.

    Example: of 4 ranks with size 2, ranks 0 and 1 are data rank 0, ranks 2 and 3 data rank 1.
    """

    def __init__(self, collectives: Collectives, size: int) -> None:
        """Every rank must call it, with the same size.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        world_size = collectives.world_size
        if size < 1 or world_size % size:
            divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
            raise OptionsError(
                code="sequence.sp_size",
                what=f"sp_size = {size}, {world_size} ranks",
                where="--sp_size",
                why=f"ranks share sequences in equal groups; allowed: {', '.join(map(str, divisors))}",
                do=f"--sp_size {min(divisors, key=lambda number: abs(number - size))}",
            )
        self.size = size
        self.data_rank, self.rank = divmod(collectives.rank, size)
        self.data_size = world_size // size
        self._group: Any = None
        if size > 1:
            groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
            self._group = groups[self.data_rank]

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Runs of equal length, the first ones a row longer where they do not divide."""
        first = _first(num_rows, self.size, self.rank)
        return first, _first(num_rows, self.size, self.rank + 1)

    def to_heads(self, rows_LHD: Tensor, num_rows: int) -> Tensor:
        """[L, H, D] -> [T, H / S, D]."""
        return _ToHeads.apply(rows_LHD, self, num_rows)

    def to_rows(self, rows_THD: Tensor, num_rows: int) -> Tensor:
        """[T, H / S, D] -> [L, H, D]."""
        return _ToRows.apply(rows_THD, self, num_rows)

    def merge(self, values: Tensor) -> Tensor:
        """The sum over the group; its gradient goes to each as it is."""
        return _Merge.apply(values, self) if self.size > 1 else values

    def lengths(self, num_rows: int) -> list[int]:
        """Rows of each rank."""
        return [_first(num_rows, self.size, rank + 1) - _first(num_rows, self.size, rank) for rank in range(self.size)]

    def trade(self, send: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Give each rank its numbers of rows of `send`, in order; what they give to this one, in order."""
        got = send.new_empty((sum(received), *send.shape[1:]))
        if self.size == 1:
            return got.copy_(send)
        dist.all_to_all_single(got, send.contiguous(), received, sent, group=self._group)
        return got

    def total(self, values: Tensor) -> Tensor:
        """A new tensor: the sum over the group."""
        added = values.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(added, group=self._group)
        return added


def _first(num_rows: int, size: int, rank: int) -> int:
    return num_rows // size * rank + min(rank, num_rows % size)


def _to_heads(group: SequenceGroup, rows_LHD: Tensor, num_rows: int) -> Tensor:
    num_local, num_heads, width = rows_LHD.shape
    share = num_heads // group.size
    by_rank = rows_LHD.view(num_local, group.size, share, width).transpose(0, 1)  # [S, L, H / S, D]
    return group.trade(by_rank.reshape(-1, share, width), [num_local] * group.size, group.lengths(num_rows))


def _to_rows(group: SequenceGroup, rows_THD: Tensor, num_rows: int) -> Tensor:
    share, width = rows_THD.shape[1:]
    lengths = group.lengths(num_rows)
    num_local = lengths[group.rank]
    got = group.trade(rows_THD, lengths, [num_local] * group.size)
    by_rank = got.view(group.size, num_local, share, width).transpose(0, 1)  # [L, S, H / S, D]
    return by_rank.reshape(num_local, group.size * share, width)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_LHD: Tensor, group: SequenceGroup, num_rows: int) -> Tensor:
        ctx.group, ctx.num_rows = group, num_rows
        return _to_heads(group, rows_LHD, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_rows(ctx.group, gradients[0], ctx.num_rows), None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_THD: Tensor, group: SequenceGroup, num_rows: int) -> Tensor:
        ctx.group, ctx.num_rows = group, num_rows
        return _to_rows(group, rows_THD, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(ctx.group, gradients[0].contiguous(), ctx.num_rows), None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        del ctx
        return group.total(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


class DataRanks:
    """The exchanges of a run, as groups that share sequences see them: each group is one rank.

    Sums take one member of each group; bytes come once a group.
    """

    def __init__(self, collectives: Collectives, group: SequenceGroup) -> None:
        self._all, self._group = collectives, group
        self.rank, self.world_size = group.data_rank, group.data_size

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the groups."""
        return self._all.sum(tensor if self._group.rank == 0 else torch.zeros_like(tensor))

    def max(self, tensor: Tensor) -> Tensor:
        """A new tensor: the elementwise maximum."""
        return self._all.max(tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every group, in order."""
        return self._all.gather_bytes(data if self._group.rank == 0 else b"")[:: self._group.size]
