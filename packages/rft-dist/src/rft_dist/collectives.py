"""Sums and exchanges over the ranks of a run, as tensors and bytes.

No object travels: what is not a tensor goes as bytes that the caller encodes, so nothing that
another process sends is ever executed. All ranks must make the same calls in the same order.

A sum over floats gives the same bits on every rank and, with the same number of ranks, in every
run: gloo's ring adds the ranks of a position in a fixed order. NCCL does so for one topology.

Every collective has a number, a shape and the line that asked for it, which the watch of this process
publishes (`rft_dist.health`), and which may be compared over the ranks before it is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rft_core.errors import PeerError
from rft_core.fault_points import declare, fault_point
from rft_dist.health.activity import Activity, Call

_BEFORE = {
    name: declare(f"collective.{name}.before", f"this rank is about to join a {name}")
    for name in ("sum", "max", "gather", "broadcast")
}
_AFTER = {
    name: declare(f"collective.{name}.after", f"a {name} over the ranks has finished here")
    for name in ("sum", "max", "gather", "broadcast")
}


class Collectives(Protocol):
    """Collective operations of a run; a single process implements them too."""

    @property
    def rank(self) -> int:
        """0 to world_size - 1."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over ranks of tensors of equal shape and dtype."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """A new tensor: the elementwise maximum over ranks."""
        ...

    def sum_in_place(self, tensor: Tensor) -> None:
        """Sum over ranks into `tensor`, which must be contiguous: no second copy of a large buffer."""
        ...

    def broadcast_in_place(self, tensor: Tensor) -> None:
        """Replace `tensor`, which must be contiguous, by that of rank 0."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order, on every rank; lengths may differ."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The bytes of rank 0 on every rank; what the others pass is ignored."""
        ...


class SingleProcess:
    """The exchanges of a run of one process: everything comes back as it went in."""

    rank = 0
    world_size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`."""
        return tensor.detach().clone()

    def max(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`."""
        return tensor.detach().clone()

    def sum_in_place(self, tensor: Tensor) -> None:
        """Leave the only rank's tensor unchanged."""

    def broadcast_in_place(self, tensor: Tensor) -> None:
        """Leave the tensor of rank 0 unchanged."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of the only rank: `[data]`."""
        return [data]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """`data`, which must be given."""
        assert data is not None, "rank 0 has to give the bytes"
        return data


class TorchCollectives:
    """The exchanges over an initialized process group of torch.

    `device` is where the backend wants its tensors (CUDA for nccl, CPU for gloo); tensors from
    elsewhere are copied there and back. A peer that dies or does not come in time is a
    `PeerError` with the number and shape of the collective. `activity` is told of every one; `compare`
    is called with it before it is joined.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        where: str = "",
        activity: Activity | None = None,
        compare: Callable[[Call], None] | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device
        self._where = where or f"rank {self.rank}"
        self._activity = activity or Activity()
        self._compare = compare

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor on the device of `tensor`: the sum over ranks."""
        # a copy also on the backend's own device: all_reduce writes into what it is given
        moved = self._copy(tensor)
        self._all_reduce("sum", moved, dist.ReduceOp.SUM)
        return moved.to(tensor.device)

    def max(self, tensor: Tensor) -> Tensor:
        """A new tensor on the device of `tensor`: the elementwise maximum over ranks."""
        moved = self._copy(tensor)
        self._all_reduce("max", moved, dist.ReduceOp.MAX)
        return moved.to(tensor.device)

    def sum_in_place(self, tensor: Tensor) -> None:
        """The sum over ranks, into the contiguous `tensor`."""
        assert tensor.is_contiguous(), "an in-place sum needs a contiguous tensor"
        moved = tensor.detach().to(self._device)
        self._all_reduce("sum", moved, dist.ReduceOp.SUM)
        # `to` copies only from another device; otherwise the sum is where it belongs already
        if moved.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(moved)

    def broadcast_in_place(self, tensor: Tensor) -> None:
        """Rank 0's values, into the contiguous `tensor`."""
        assert tensor.is_contiguous(), "a broadcast needs a contiguous tensor"
        moved = tensor.detach().to(self._device)
        self._broadcast(moved)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(moved)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank in rank order: lengths first, then one padded uint8 tensor each."""
        lengths = [int(entry) for entry in torch.cat(self._all_gather(self._length_of(data))).tolist()]
        longest = max(lengths)
        # every rank has the same lengths, so that all of them leave here or none
        if longest == 0:
            return [b""] * self.world_size
        # all_gather takes tensors of one shape only
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = _bytes_to_tensor(data)
        parts = self._all_gather(padded.to(self._device))
        return [_tensor_to_bytes(part[:size]) for part, size in zip(parts, lengths, strict=True)]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes: length first, then one uint8 tensor."""
        own = data if self.rank == 0 else b""
        assert own is not None, "rank 0 has to give the bytes"
        length = self._length_of(own)
        self._broadcast(length)
        size = int(length.item())
        # every rank knows the size by now, so that none waits alone in the second broadcast
        if size == 0:
            return b""
        moved = _bytes_to_tensor(own) if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        moved = moved.to(self._device)
        self._broadcast(moved)
        return _tensor_to_bytes(moved)

    def _length_of(self, data: bytes) -> Tensor:
        return torch.tensor([len(data)], device=self._device)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)

    def _all_reduce(self, name: str, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        with self._joined(name, tensor):
            dist.all_reduce(tensor, op=operation)

    def _broadcast(self, tensor: Tensor) -> None:
        with self._joined("broadcast", tensor):
            dist.broadcast(tensor, src=0)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._joined("gather", tensor):
            dist.all_gather(parts, tensor)
        return parts

    @contextmanager
    def _joined(self, name: str, tensor: Tensor) -> Iterator[None]:
        fault_point(_BEFORE[name])
        call = self._activity.enter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        try:
            if self._compare is not None:
                self._compare(call)
            yield
        except RuntimeError as error:  # every error of torch.distributed is one
            raise PeerError(
                code="collective.failed",
                what=f"collective {call.describe()} did not finish",
                where=self._where,
                why=f"another rank died, hung or called something else: {_first_line(error)}",
                state="this step is lost; the last checkpoint is untouched",
                do="read the first error among logs/rank_*.log, then resume from the last checkpoint",
            ) from error
        # not in a `finally`: a call that failed stays entered, and reports name it as where this rank is
        self._activity.leave(call)
        fault_point(_AFTER[name])


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or ["no reason was given"])[0][:300]


def _bytes_to_tensor(data: bytes) -> Tensor:
    # a bytearray, since torch wants memory that may be written; it must not be empty
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
