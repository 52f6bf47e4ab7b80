"""Shards of distributed tensors: the block that a rank holds, its offset, and the full tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft_dist.checkpoint_format.shards import Shard as CheckpointShard
from rft_dist.checkpoint_format.shards import ShardRequest


def local(tensor: Tensor) -> Tensor:
    """Return this rank's block of a distributed tensor (sharing memory), or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """Index of the first element of this rank's block in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return _place(tensor, 0)[0]


def _place(tensor: DTensor, first: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of the block that is left when the dimensions of the mesh from `first` on have cut.

    The last dimension of the mesh cuts first, as a matrix in parts is cut again into blocks; each cuts what is left
    into pieces of equal size, the last ones smaller or empty (`torch.chunk`).
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the mesh of the tensor"
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    for number in reversed(range(first, tensor.device_mesh.ndim)):
        cut = _cut_dimension(tensor, number)
        if cut is not None:
            piece = -(-shape[cut] // tensor.device_mesh.shape[number])
            begin = min(coordinate[number] * piece, shape[cut])
            start[cut], shape[cut] = start[cut] + begin, min(piece, shape[cut] - begin)
    return tuple(start), tuple(shape)


def _cut_dimension(tensor: DTensor, number: int) -> int | None:
    """The dimension of the tensor that a dimension of its mesh cuts; None = each there holds the same."""
    kind = tensor.placements[number]
    return None if isinstance(kind, Replicate) else int(getattr(kind, "dim"))  # noqa: B009  # torch has two classes


def num_copies(tensor: Tensor, world_size: int) -> int:
    """Count the ranks that hold the same block; a mesh may contain some of them, and other meshes the rest."""
    if not isinstance(tensor, DTensor):
        return world_size
    num_blocks = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        num_blocks *= 1 if isinstance(placement, Replicate) else size
    return world_size // num_blocks


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank is the lowest of those that hold this block: the one to write it."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the mesh of the tensor"
    of_first_mesh = bool((mesh.mesh == 0).any())  # of several meshes with a part of the ranks each, that of rank 0
    return of_first_mesh and all(
        index == 0 for index, kind in zip(coordinate, tensor.placements, strict=True) if isinstance(kind, Replicate)
    )


def full_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) one after another, so that one whole tensor is there at a time.

    Every rank must go through all of them in the same order: each is put together by an exchange.
    """
    for name, tensor in named_tensors:
        with torch.no_grad():  # not around the yield, where it would hold for whoever takes the tensor
            full = full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        yield name, full.detach()


def full_tensor(tensor: DTensor) -> Tensor:
    """Gather the full tensor from its blocks; every rank of its mesh must call it.

    One dimension of the mesh after another, the first first: it cut last, see `_place`. torch's own way over several
    wants pieces of equal size.
    """
    if tensor.device_mesh.ndim == 1:
        return tensor.full_tensor()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "a mesh without names"
    gathered = tensor.to_local()
    for number, name in enumerate(names):
        cut = _cut_dimension(tensor, number)
        if cut is None:
            continue
        shape = torch.Size(_place(tensor, number + 1)[1])
        strides = torch.empty(shape, device="meta").stride()
        mesh = tensor.device_mesh[name]
        # shape and strides are given, because torch would take pieces of unequal size for equal ones
        block = DTensor.from_local(gathered, mesh, [Shard(cut)], run_check=False, shape=shape, stride=strides)
        gathered = block.full_tensor()
    return gathered


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds less than the full tensor."""
    return isinstance(tensor, DTensor) and any(not isinstance(kind, Replicate) for kind in tensor.placements)


class ShardedWeights:
    """The parameters of a model as the ranks keep them: distributed tensors, or the same full ones on every rank."""

    def __init__(
        self,
        named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        rank: int,
        *,
        written: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Keep what gives the parameters.

        Args:
            named_parameters: is asked anew at every use, as they may be replaced.
            rank: of this process.
            written: is called with this rank's shard of a parameter after `write`; for copies that are stepped on.
        """
        self._named_parameters = named_parameters
        self._rank = rank
        self._written = written

    def full_tensors(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, full parameter) one by one, on every rank, see `full_tensors`; `trained`: no frozen ones."""
        return full_tensors((n, p) for n, p in self._named_parameters() if p.requires_grad or not trained)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard of the parameter, sharing its memory), without an exchange."""
        for name, parameter in self._named_parameters():
            yield name, local(parameter.detach())

    def state_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards by name; none of some parameters, where there are more ranks than rows."""
        return {name: tensor for name, tensor in self.local_shards() if tensor.numel()}

    def shard_requests(self) -> list[ShardRequest]:
        """Return requests for this rank's shards."""
        return [
            ShardRequest(name, tuple(parameter.shape), shard.dtype, start_of(parameter), tuple(shard.shape))
            for name, parameter in self._named_parameters()
            if (shard := local(parameter)).numel()
        ]

    @torch.no_grad()
    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Copy a tensor that was read into this rank's shard (`ShardSink`)."""
        del start
        shard = local(dict(self._named_parameters())[name])
        shard.copy_(tensor)
        if self._written is not None:
            self._written(shard)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each full parameter that requires a gradient, by name."""
        return {name: tuple(parameter.shape) for name, parameter in self._named_parameters() if parameter.requires_grad}

    def own_blocks(self, names: Collection[str]) -> list[CheckpointShard]:
        """Return this rank's shards of these parameters, sharing memory; of what several ranks keep, on the lowest."""
        return [
            CheckpointShard(name, tuple(parameter.shape), start_of(parameter), shard)
            for name, parameter in self._named_parameters()
            if name in names and is_first_copy(parameter, self._rank) and (shard := local(parameter.detach())).numel()
        ]

    def blocks(self) -> list[CheckpointShard]:
        """Return this rank's shards with their places, sharing memory; also those that other ranks keep too."""
        return [
            CheckpointShard(name, tuple(parameter.shape), start_of(parameter), shard)
            for name, parameter in self._named_parameters()
            if (shard := local(parameter.detach())).numel()
        ]

    def checkpoint_tensors(self) -> list[CheckpointShard]:
        """Return the shards that this rank saves; one that several ranks keep comes from the lowest of them."""
        first = {name for name, parameter in self._named_parameters() if is_first_copy(parameter, self._rank)}
        return [replace(block, data=block.data.contiguous()) for block in self.blocks() if block.name in first]
