"""Sequence parallel: all-to-all of tokens for heads (Ulysses), or keys and values sent around a ring.

What a rank sends in one trade is T H D / S numbers of which 1 / S stay: each of four trades a layer moves less, the
more ranks there are (arXiv 2309.14509, section 3). In a ring every rank sends the keys and values of T / S tokens
S - 1 times in the forward pass and again in the backward pass, there with their gradients; a transfer can overlap
the attention over the keys that have already arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft_dist.collectives import Collectives
from rft_dist.strategies.process_groups import SubGroup


class SequenceGroup(SubGroup):
    """The ranks that share rows with this one, see `SubGroup`."""

    def __init__(self, collectives: Collectives, size: int) -> None:
        """Every rank must call it, with the same size.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        super().__init__(collectives, size, flag="sp_size", code="sequence.sp_size", what="sequences")

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Return (first, end) of this rank's rows: runs of equal length, the first ones a row longer on a remainder."""
        first = _first(num_rows, self.size, self.rank)
        return first, _first(num_rows, self.size, self.rank + 1)

    def lengths(self, num_rows: int) -> list[int]:
        """Return the number of rows of each rank."""
        return [_first(num_rows, self.size, rank + 1) - _first(num_rows, self.size, rank) for rank in range(self.size)]

    def to_heads(self, rows_LHD: Tensor, num_rows: int) -> Tensor:
        """Exchange this rank's tokens for its heads: [L, H, D] -> [T, H / S, D]."""
        return _ToHeads.apply(rows_LHD, self, num_rows)

    def to_rows(self, rows_THD: Tensor, num_rows: int) -> Tensor:
        """Exchange this rank's heads for its tokens: [T, H / S, D] -> [L, H, D]."""
        return _ToRows.apply(rows_THD, self, num_rows)

    def hand_out(self, rows_LD: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Give each rank its number of these rows, in order; those that they give to this one, in order."""
        return _HandOut.apply(rows_LD, self, sent, received)

    def pass_on(self, tensors: Sequence[Tensor], num_arriving: int) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank; the result waits for those of the rank before."""
        outgoing = [tensor.detach().contiguous() for tensor in tensors]
        incoming = [tensor.new_empty((num_arriving, *tensor.shape[1:])) for tensor in outgoing]
        first = self.data_rank * self.size
        following, preceding = (first + (self.rank + step) % self.size for step in (1, -1))
        # empty tensors are left out on both sides: the receiver knows by `num_arriving` that none comes
        moves = [dist.P2POp(dist.isend, tensor, following, self._group) for tensor in outgoing if tensor.numel()]
        moves += [dist.P2POp(dist.irecv, tensor, preceding, self._group) for tensor in incoming if tensor.numel()]
        # in one batch: a ring whose ranks all begin with a send alone may wait for itself under NCCL
        works = dist.batch_isend_irecv(moves) if moves else []

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            outgoing.clear()  # buffers must live until the send has completed
            return incoming

        return wait

    def trade(self, send: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Give each rank its numbers of rows of `send`, in order; what they give to this one, in order."""
        got = send.new_empty((sum(received), *send.shape[1:]))
        if self.size == 1:
            return got.copy_(send)
        dist.all_to_all_single(got, send.contiguous(), received, sent, group=self._group)
        return got


def _first(num_rows: int, size: int, rank: int) -> int:
    return num_rows // size * rank + min(rank, num_rows % size)


def _to_heads(group: SequenceGroup, rows_LHD: Tensor, num_rows: int) -> Tensor:
    num_local, num_heads, width = rows_LHD.shape
    share = num_heads // group.size
    # ranks become the first dimension, the one along which `trade` cuts
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
        # the exchange the other way round: a gradient goes back to where its value came from
        return _to_rows(ctx.group, gradients[0], ctx.num_rows), None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_THD: Tensor, group: SequenceGroup, num_rows: int) -> Tensor:
        ctx.group, ctx.num_rows = group, num_rows
        return _to_rows(group, rows_THD, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(ctx.group, gradients[0].contiguous(), ctx.num_rows), None, None


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_LD: Tensor, group: SequenceGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return group.trade(rows_LD, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.trade(gradients[0], ctx.received, ctx.sent), None, None, None
