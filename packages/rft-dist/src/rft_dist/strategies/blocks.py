"""Blocks of tensors: which part of a whole tensor a rank holds, and how the whole comes together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its block of a distributed one (sharing memory), else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """Index of the first element of this rank's block in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start)


def num_copies(tensor: Tensor, world_size: int) -> int:
    """How many ranks hold the same block as this one; a mesh may have a part of them, and others the rest."""
    if not isinstance(tensor, DTensor):
        return world_size
    num_blocks = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        num_blocks *= 1 if isinstance(placement, Replicate) else size
    return world_size // num_blocks


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Whether this rank is the lowest of those that hold this block: the one to write it."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the mesh of the tensor"
    of_first_mesh = bool((mesh.mesh == 0).any())  # of several meshes with a part of the ranks each, that of rank 0
    return of_first_mesh and all(
        place == 0 for place, kind in zip(coordinate, tensor.placements, strict=True) if isinstance(kind, Replicate)
    )


def whole_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) one after another, so that one whole tensor is there at a time.

    Every rank must go through all of them in the same order: each is put together by an exchange.
    """
    for name, tensor in named_tensors:
        with torch.no_grad():  # not around the yield, where it would hold for whoever takes the tensor
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach()


def fill_blocks(named_tensors: Iterable[tuple[str, Tensor]], name: str, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor into its block; nothing is exchanged."""
    target = dict(named_tensors)[name]
    block = local(target.detach())
    places = tuple(slice(first, first + size) for first, size in zip(start_of(target), block.shape, strict=True))
    block.copy_(whole[places])


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds less than the whole."""
    return isinstance(tensor, DTensor) and any(isinstance(kind, Shard) for kind in tensor.placements)
