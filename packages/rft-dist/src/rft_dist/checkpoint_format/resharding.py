"""Resharding: the table of the blocks in a checkpoint's files, and reading any other block from them.

A component that one rank gave whole is one file, state/<component>.safetensors, and needs no table:
its header says all. One that several ranks gave has a file for each of them,
state/<component>/rank_00000-of-00004.safetensors, and the manifest lists every block. A block's key
in its file is the tensor's name, or "<name>@<start>" where it is not the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import STATE
from rft_dist.checkpoint_format.safetensors_pieces import DTYPES
from rft_dist.checkpoint_format.shards import Shard, ShardRequest, ShardSink, fits, flat_offset

BLOCKS = "blocks"
"""Key of a shard file's metadata: a JSON object, block key -> [name, global shape, start]."""
_MOST_BLOCKS = 2**13
"""Of a tensor in a manifest: more than one a rank of any run."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor in a file."""

    file: str
    """Relative to the directory that the table describes."""
    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose blocks are in files."""

    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


Table = Mapping[str, StoredTensor]


def rank_file(component: str, rank: int, world_size: int) -> str:
    """Return the file of a rank: "state/optimizer/rank_00000-of-00004.safetensors"."""
    return f"{STATE}/{component}/rank_{rank:05d}-of-{world_size:05d}.safetensors"


def block_key(name: str, start: Sequence[int], *, is_whole: bool) -> str:
    """Name of a block in its file."""
    return name if is_whole else f"{name}@{','.join(map(str, start))}"


def key_of(shard: Shard) -> str:
    """Name of a shard in the file of its rank."""
    return block_key(shard.name, shard.start, is_whole=shard.is_whole)


def to_json(table: Table) -> dict[str, Any]:
    """Name -> [dtype, shape, [[file, start, shape], ...]]."""
    return {
        name: [
            entry.dtype,
            list(entry.shape),
            [[block.file, list(block.start), list(block.shape)] for block in entry.blocks],
        ]
        for name, entry in table.items()
    }


def from_json(value: Any) -> dict[str, StoredTensor]:
    """The table that `to_json` gave. Raises ValueError for any other form."""
    if not isinstance(value, dict):
        raise ValueError("a table of blocks is not an object")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in value.items():
        is_form = isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], list)
        if not (is_form and isinstance(entry[0], str) and entry[0] in DTYPES):
            raise ValueError(f"tensor {name!r} is not [dtype, shape, blocks]")
        shape = _naturals(entry[1])
        blocks: list[Block] = []
        for block in entry[2]:
            if not (isinstance(block, list) and len(block) == 3 and isinstance(block[0], str)):
                raise ValueError(f"a block of {name!r} is not [file, start, shape]")
            start, extent = _naturals(block[1]), _naturals(block[2])
            if not fits(shape, start, extent):
                raise ValueError(f"a block of {name!r} leaves the tensor")
            blocks.append(Block(block[0], block_key(name, start, is_whole=extent == shape), start, extent))
        tensors[name] = StoredTensor(entry[0], shape, tuple(blocks))
    return tensors


def fault_of(table: Table, sizes: Mapping[str, int]) -> str:
    """Return why files of these sizes in bytes cannot hold the blocks of a table; empty where they can.

    Every element must be in exactly one block: memory that none fills would be taken for values.
    """
    stored: dict[str, int] = {}
    for name, entry in table.items():
        problem = _cover(entry) if len(entry.blocks) <= _MOST_BLOCKS else f"{len(entry.blocks)} blocks"
        if problem:
            return f"tensor {name!r}: {problem}"
        for block in entry.blocks:
            num_bytes = math.prod(block.shape) * DTYPES[entry.dtype].itemsize
            stored[block.file] = stored.get(block.file, 0) + num_bytes
    larger = [file for file, num_bytes in stored.items() if num_bytes > sizes[file]]
    return f"the blocks of {larger[0]} take more bytes than it has" if larger else ""


def _naturals(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)):
        raise ValueError("a shape or a start is not a list of natural numbers")
    return tuple(value)


def merged(component: str, parts: Iterable[Table]) -> dict[str, StoredTensor]:
    """One table of the ranks' tables, in rank order.

    Raises CheckpointError unless dtype and global shape agree and every element is in exactly one block.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, entry in part.items():
            known = tensors.get(name, StoredTensor(entry.dtype, entry.shape, ()))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                difference = f"{known.dtype} {list(known.shape)} and {entry.dtype} {list(entry.shape)}"
                raise _bad_blocks(component, name, f"ranks give it as {difference}")
            tensors[name] = StoredTensor(entry.dtype, entry.shape, known.blocks + entry.blocks)
    for name, entry in tensors.items():
        problem = _cover(entry)
        if problem:
            raise _bad_blocks(component, name, problem)
    return tensors


def _cover(entry: StoredTensor) -> str:
    """Why the blocks do not cover the tensor exactly once; empty where they do."""
    blocks = [block for block in entry.blocks if math.prod(block.shape)]
    num_stored, num_needed = sum(math.prod(block.shape) for block in blocks), math.prod(entry.shape)
    # with enough elements, all inside the tensor, blocks that do not overlap cover it
    if num_stored < num_needed:
        return f"its blocks hold {num_stored} of {num_needed} elements"
    flat = [_flat_range(entry.shape, block) for block in blocks]
    ranges = sorted(entry for entry in flat if entry is not None)
    if len(ranges) == len(flat):
        overlap = any(end > following for (_, end), (following, _) in itertools.pairwise(ranges))
    else:  # blocks with holes between their rows: few, one a rank of a tensor-parallel group
        overlap = any(_overlap(one, other) for i, one in enumerate(blocks) for other in blocks[:i])
    return f"two ranks give the same elements of {list(entry.shape)}" if overlap else ""


def _flat_range(shape: tuple[int, ...], block: Block) -> tuple[int, int] | None:
    """(first, end) in the flattened tensor, None where the block is not contiguous in it."""
    # after the first axis with more than one element a block must be as wide as the tensor
    axis = next((axis for axis, size in enumerate(block.shape) if size != 1), len(shape))
    if block.shape[axis + 1 :] != shape[axis + 1 :]:
        return None
    first = flat_offset(shape, block.start)
    return first, first + math.prod(block.shape)


def _overlap(one: Block | ShardRequest, other: Block) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(start, end) of what both hold, None where they hold nothing in common."""
    start = tuple(map(max, one.start, other.start))
    ends = [tuple(a + b for a, b in zip(box.start, box.shape, strict=True)) for box in (one, other)]
    end = tuple(map(min, *ends)) if start else ()
    return (start, end) if all(a < b for a, b in zip(start, end, strict=True)) else None


class BlockReader:
    """Blocks of the tensors of one directory; files are opened once and only what is asked for is read."""

    def __init__(self, directory: Path, table: Table) -> None:
        self._directory = directory
        self.table = table
        self._open: dict[str, Any] = {}

    def read(self, request: ShardRequest) -> Tensor:
        """The block, assembled from those that hold parts of it. Raises CheckpointError naming what differs."""
        entry = self._checked(request)
        result = torch.empty(request.shape, dtype=request.dtype)
        for block in entry.blocks:
            common = _overlap(request, block)
            if common is None:
                continue
            start, end = common
            source = tuple(slice(a - o, b - o) for a, b, o in zip(start, end, block.start, strict=True))
            target = tuple(slice(a - o, b - o) for a, b, o in zip(start, end, request.start, strict=True))
            result[target] = self._piece(block, source, entry.dtype)
        return result

    def full_tensor(self, name: str) -> Tensor:
        """A tensor in full."""
        entry = self.table[name]
        return self.read(ShardRequest(name, entry.shape, DTYPES[entry.dtype], (0,) * len(entry.shape), entry.shape))

    def load(self, sink: ShardSink) -> int:
        """Give the sink every block that it wants, and their number. Nothing is put unless all of them are there."""
        requests = list(sink.shard_requests())
        for each in requests:  # all before the first is put: a sink is never filled in part
            self._checked(each)
        for each in requests:
            sink.write(each.name, each.start, self.read(each))
        return len(requests)

    def _checked(self, request: ShardRequest) -> StoredTensor:
        entry = self.table.get(request.name)
        want = f"{request.dtype} {list(request.global_shape)}".removeprefix("torch.")
        if entry is None:
            raise self._differs(request, want, f"no such tensor among {len(self.table)}")
        have = f"{DTYPES[entry.dtype]} {list(entry.shape)}".removeprefix("torch.")
        if have != want:
            raise self._differs(request, want, have)
        return entry

    def _differs(self, request: ShardRequest, want: str, have: str) -> CheckpointError:
        return CheckpointError(
            code="checkpoint.tensor_differs",
            what=f"tensor {request.name}: wanted {want}, the checkpoint has {have}",
            where=str(self._directory),
            why="a state is continued only in tensors of the same name, shape and dtype",
            state="nothing was loaded",
            do="resume with the model and the settings of the run that saved it",
        )

    def _piece(self, block: Block, source: tuple[slice, ...], dtype: str) -> Tensor:
        if block.file not in self._open:
            self._open[block.file] = safe_open(self._directory / block.file, framework="pt")
        piece = self._open[block.file].get_slice(block.key)
        found, stated = (str(piece.get_dtype()), list(piece.get_shape())), (dtype, list(block.shape))
        # torch would stretch or convert what does not fit
        if found != stated:
            raise self._other_block(block, f"{found[0]} {found[1]}", f"{stated[0]} {stated[1]}")
        # a scalar cannot be sliced
        if not source:
            return self._open[block.file].get_tensor(block.key)
        return piece[source]

    def _other_block(self, block: Block, found: str, stated: str) -> CheckpointError:
        return CheckpointError(
            code="checkpoint.tensor_differs",
            what=f"block {block.key} of {block.file} is {found}, the manifest says {stated}",
            where=str(self._directory),
            why="the manifest and the file of a rank were not written together",
            state="nothing was loaded",
            do="resume from another checkpoint of the run",
        )


def table_of_files(directory: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    """The table of safetensors files that hold whole tensors, from their headers: a plain Hugging Face directory."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        with safe_open(directory / file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 - no mapping
                piece = stream.get_slice(name)
                shape = tuple(piece.get_shape())
                tensors[name] = StoredTensor(piece.get_dtype(), shape, (Block(file, name, (0,) * len(shape), shape),))
    return tensors


def _bad_blocks(component: str, name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        code="checkpoint.blocks_do_not_fit",
        what=f"tensor {name} of component {component}: {problem}",
        where=f"blocks that the ranks gave for {component}",
        why="every element of a tensor must be saved exactly once, or it could not be restored",
        state="the save was not acknowledged; the checkpoints before it are untouched",
        do="report this: the strategy of this run cuts its tensors wrongly",
    )
