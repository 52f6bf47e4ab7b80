"""Shards: rectangular blocks of named tensors, which ranks save to a checkpoint and load from one.

A tensor of global shape [R, C] that four ranks share by rows is four blocks [R/4, C] with starts
(0, 0), (R/4, 0), ...; one that every rank holds is given whole by one of them. A rank that holds a
range of the flattened tensor instead (ZeRO's partitions) gives at most 2 D - 1 blocks for it
(`flat_shards`), so that one form serves all: whoever loads asks for other blocks of the same
tensors (`ShardRequest`) and does not need to know how they were cut when they were saved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's block of a tensor.

    Example: rows 4 to 7 of a [8, 3] weight are `Shard("w", (8, 3), (4, 0), weight[4:])`.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    """Index of the block's first element in the whole tensor."""
    data: Tensor
    """The block, contiguous, on any device."""

    def __post_init__(self) -> None:
        assert fits(self.global_shape, self.start, tuple(self.data.shape)), (
            f"{self.name}: block {list(self.data.shape)} at {self.start} leaves {self.global_shape}"
        )

    @property
    def is_whole(self) -> bool:
        """True where the block is the full tensor."""
        return tuple(self.data.shape) == self.global_shape


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A block that a rank needs: `shape` elements from `start` on of a tensor of this global shape and dtype."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert fits(self.global_shape, self.start, self.shape), (
            f"{self.name}: block {self.shape} at {self.start} leaves {self.global_shape}"
        )


class ShardSink(Protocol):
    """A part of a run that is loaded block by block."""

    def shard_requests(self) -> Sequence[ShardRequest]:
        """The blocks that this rank needs, in any order, of any overlap."""
        ...

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Take the block of `name` at `start`, on the CPU, with the shape and dtype that were requested."""
        ...


class StoredComponent(Protocol):
    """A component of a checkpoint, which a part of a run is restored from."""

    @property
    def names(self) -> Collection[str]:
        """The names of its tensors."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Type in which one of its tensors was saved."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors in full, on the CPU."""
        ...

    def load(self, sink: ShardSink) -> None:
        """Write the shards that the sink requests; CheckpointError, and nothing is written, where one differs."""
        ...


def full_shard(name: str, tensor: Tensor) -> Shard:
    """The shard of a tensor that this rank holds in full."""
    return Shard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())


def shards_of(part: Mapping[str, Tensor] | Sequence[Shard]) -> list[Shard]:
    """Return a component's shards: those given, or a full one of every tensor of a mapping."""
    return full_shards(part) if isinstance(part, Mapping) else list(part)


def full_shards(tensors: Mapping[str, Tensor]) -> list[Shard]:
    """A shard of every tensor, in the order of the mapping."""
    return [full_shard(name, tensor) for name, tensor in tensors.items()]


def flat_shards(name: str, global_shape: Sequence[int], offset: int, data: Tensor) -> list[Shard]:
    """The blocks of a range of the flattened tensor: elements `offset` to `offset + data.numel() - 1`, row-major."""
    shape = tuple(global_shape)
    flat = data.detach().reshape(-1)
    if not math.prod(shape):  # a tensor without elements is still there
        return [Shard(name, shape, (0,) * len(shape), flat.view(shape))]
    blocks, taken = [], 0
    for start, extent in flat_blocks(shape, offset, flat.numel()):
        size = math.prod(extent)
        blocks.append(Shard(name, shape, start, flat[taken : taken + size].view(extent)))
        taken += size
    return blocks


def flat_requests(
    name: str, global_shape: Sequence[int], dtype: torch.dtype, offset: int, numel: int
) -> list[ShardRequest]:
    """Return the requests of a rank that holds elements `offset` to `offset + numel - 1` of the flattened tensor."""
    shape = tuple(global_shape)
    return [ShardRequest(name, shape, dtype, start, extent) for start, extent in flat_blocks(shape, offset, numel)]


def flat_offset(global_shape: Sequence[int], start: Sequence[int]) -> int:
    """Position in the flattened tensor of the element at `start`."""
    position = 0
    for size, index in zip(global_shape, start, strict=True):
        position = position * size + index
    return position


def flat_blocks(shape: tuple[int, ...], offset: int, numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of blocks that cover a flat range in order, each contiguous in the flattened tensor.

    Example: elements 2 to 10 of a [4, 3] tensor are (0, 2) [1, 1], (1, 0) [2, 3] and (3, 0) [1, 2].
    """
    assert 0 <= offset <= offset + numel <= math.prod(shape), f"{offset} + {numel} leaves {shape}"
    end = offset + numel
    while offset < end:
        start, extent, taken = _largest_block(shape, offset, end - offset)
        yield start, extent
        offset += taken


def _largest_block(shape: tuple[int, ...], offset: int, room: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The largest contiguous block that begins at `offset` and has at most `room` elements."""
    start = _unravel(shape, offset)
    stride = 1
    best_axis, best_stride = len(shape), 1
    for axis in reversed(range(len(shape))):
        # one more axis only where the block begins at the start of all axes below and a whole step fits
        if stride > room or any(start[axis + 1 :]):
            break
        best_axis, best_stride = axis, stride
        stride *= shape[axis]
    if best_axis == len(shape):  # a scalar
        return start, (), 1
    count = min(shape[best_axis] - start[best_axis], room // best_stride)
    extent = (1,) * best_axis + (count,) + shape[best_axis + 1 :]
    return start, extent, count * best_stride


def _unravel(shape: tuple[int, ...], position: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, here = divmod(position, size)
        index.append(here)
    return tuple(reversed(index))


def assign_by_bytes(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """A rank for every name, so that ranks have about equal bytes: the largest first, to the rank with the least."""
    loads = [0] * world_size
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[name] = rank
        loads[rank] += sizes[name]
    return owners


def fits(global_shape: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a block lies inside the tensor."""
    if not len(global_shape) == len(start) == len(shape):
        return False
    boxes = zip(global_shape, start, shape, strict=True)
    return all(0 <= begin <= begin + size <= length for length, begin, size in boxes)
