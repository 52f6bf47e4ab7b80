"""Process groups of neighbouring ranks, and the collectives of a run in which each such group counts as one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft_dist.collectives import Collectives
from rft_dist.planning.parallel_dims import EXPERTS, refuse_uneven_group


class SubGroup:
    """Ranks g S .. g S + S - 1, which share the samples of data rank g.

    Example: of 4 ranks with size 2, ranks 0 and 1 are data rank 0, ranks 2 and 3 data rank 1.
    """

    def __init__(self, collectives: Collectives, size: int, *, flag: str, code: str, what: str) -> None:
        """Every rank must call it, with the same size; `flag` asked for it, and the ranks share `what`.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        world_size = collectives.world_size
        refuse_uneven_group(size, world_size, flag=flag, code=code, what=what)
        self.size = size
        self.data_rank, self.rank = divmod(collectives.rank, size)
        self.data_size = world_size // size
        self._group: Any = None
        if size > 1:
            self._group = self._made(world_size)

    def _made(self, world_size: int) -> Any:
        """Create the process groups of all ranks and return that of this rank."""
        # every rank creates all groups: `new_group` is a collective of the whole world
        groups = [dist.new_group(list(range(first, first + self.size))) for first in range(0, world_size, self.size)]
        return groups[self.data_rank]

    @property
    def world_size(self) -> int:
        """Number of ranks of the group, under the name that `Collectives` has for it."""
        return self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the group."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """A new tensor: the elementwise maximum over the group."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def merge(self, values: Tensor) -> Tensor:
        """The sum over the group; its gradient goes to each as it is."""
        return _Merge.apply(values, self) if self.size > 1 else values

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        added = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(added, op=operation, group=self._group)
        return added


class MeshGroup(SubGroup):
    """The ranks that hold the parts of one copy, see `SubGroup`, with meshes for distributed tensors."""

    dimension: ClassVar[str]
    """Name of the mesh dimension that this group is."""

    def __init__(
        self, collectives: Collectives, size: int, device: torch.device, *, flag: str, code: str, what: str
    ) -> None:
        """Every rank must call it, with the same size; the last three as of `SubGroup`.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        self._device = device
        self._meshes: DeviceMesh | None = None
        self.everyone = collectives
        super().__init__(collectives, size, flag=flag, code=code, what=what)

    def _made(self, world_size: int) -> Any:
        shape = (world_size // self.size, self.size)
        self._meshes = init_device_mesh(self._device.type, shape, mesh_dim_names=("data", self.dimension))
        return self._meshes[self.dimension].get_group()

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of this group."""
        assert self._meshes is not None, "a group of one has no mesh"
        return self._meshes[self.dimension]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The device mesh of the ranks that hold the same parts, which may be sharded further (`FullyShardedModel`)."""
        assert self._meshes is not None, "a group of one has no mesh"
        return self._meshes["data"]

    def sum_over_copies(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor in place over the ranks that hold the same parts."""
        if self.data_size > 1:
            assert self._meshes is not None
            dist.all_reduce(tensor, group=self._meshes["data"].get_group())


class TensorGroup(MeshGroup):
    """The ranks that hold the parts of one copy, see `SubGroup`."""

    dimension = "tensor"

    def __init__(self, collectives: Collectives, size: int, device: torch.device) -> None:
        """Every rank must call it, with the same size.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        super().__init__(collectives, size, device, flag="tp_size", code="tensor.tp_size", what="matrices")


class ExpertGroup(MeshGroup):
    """The ranks that hold the experts of one copy; each has samples of its own, so it is no one data rank.

    Example: of 4 ranks with size 2 and 8 experts, ranks 0 and 2 hold experts 0 to 3, ranks 1 and 3 experts 4 to 7.
    """

    dimension = "expert"

    def __init__(self, collectives: Collectives, size: int, device: torch.device) -> None:
        """Every rank must call it, with the same size.

        Raises:
            OptionsError: the size does not divide the number of ranks.
        """
        super().__init__(collectives, size, device, **EXPERTS)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to the ranks of the group and return those that came from them, both in rank order.

        The gradient of each row goes back to where the row came from. Every rank of the group calls it.

        Args:
            rows: [N, ...] the rows for rank 0 of the group first.
            sent: number of rows for each rank; they add up to N.
            received: number of rows from each rank.
        """
        return _Exchange.apply(rows, self, tuple(sent), tuple(received)) if self.size > 1 else rows

    def sent_around(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """`exchange` without a gradient."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self._group)
        return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ExpertGroup, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.way_back = (group, received, sent)
        return group.sent_around(rows.detach(), sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        group, sent, received = ctx.way_back
        return group.sent_around(gradients[0], sent, received), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SubGroup) -> Tensor:
        del ctx
        return group.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        # no sum: each rank has the gradient of the whole, in which its own values have the factor 1
        return gradients[0], None


class DataParallelRanks:
    """The exchanges of a run, as groups that share samples see them: each group is one rank.

    Sums take one member of each group; bytes come once a group.
    """

    def __init__(self, collectives: Collectives, group: SubGroup) -> None:
        self._all, self._group = collectives, group
        self.rank, self.world_size = group.data_rank, group.data_size

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the groups."""
        # the other members add zeros: they must join, as the sum is over all ranks
        return self._all.sum(tensor if self._group.rank == 0 else torch.zeros_like(tensor))

    def max(self, tensor: Tensor) -> Tensor:
        """A new tensor: the elementwise maximum."""
        return self._all.max(tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every group, in order."""
        return self._all.gather_bytes(data if self._group.rank == 0 else b"")[:: self._group.size]
