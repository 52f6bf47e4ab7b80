"""A copy of a distributed model's weights in host memory: each rank copies its own blocks, and nothing is exchanged.

Where ranks hold full weights (data parallel, ZeRO 1 and 2) the copy of each is full; it is saved once all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import Shard, ShardRequest, StoredComponent
from rft_dist.strategies.protocols import ModelWeights


class WeightsSnapshot:
    """The weights as they were when `keep` was called; one more set of this rank's blocks in memory and in checkpoints.

    Example::

        best = WeightsSnapshot(weights, names)
        best.keep()          # the evaluation was the best so far
        ...
        best.put_back()      # the model has these weights again
    """

    def __init__(self, weights: ModelWeights, names: Collection[str]) -> None:
        """`names` are the parameters that are copied, the same on every rank."""
        self._weights, self._names = weights, frozenset(names)
        self._kept: dict[str, list[Shard]] = {}

    def keep(self) -> None:
        """Copy this rank's blocks as they are now to the host."""
        # a copy also where the weights are on the CPU already: the optimizer updates them in place
        kept = [replace(block, data=block.data.to("cpu", copy=True)) for block in self._blocks()]
        self._kept = _by_name(kept)

    def put_back(self) -> None:
        """Restore the kept values to the parameters; they stay as they are where none were kept."""
        for blocks in self._kept.values():
            for block in blocks:
                # in place, since the optimizer and the engine hold these tensors
                self._weights.write(block.name, block.start, block.data)

    def checkpoint_tensors(self) -> list[Shard]:
        """Return the shards that this rank saves, of the kept values; the present ones before anything was kept."""
        # never empty: a checkpoint has the same tensors before and after the first evaluation
        saved = [shard for shard in self._weights.checkpoint_tensors() if shard.name in self._names]
        return [self._kept_values(shard) for shard in saved] if self._kept else saved

    def restore(self, stored: StoredComponent) -> None:
        """Read this rank's blocks of what a run of any strategy and number of ranks saved.

        Raises:
            CheckpointError: other parameters, or parameters of other sizes.
        """
        if set(stored.names) != self._names:
            raise _other_parameters(self._names, stored.names)
        sink = _Arriving(self._blocks(), stored)
        stored.load(sink)
        self._kept = _by_name(sink.arrived)

    def _blocks(self) -> list[Shard]:
        return [block for block in self._weights.blocks() if block.name in self._names]

    def _kept_values(self, saved: Shard) -> Shard:
        """Return the kept values of a block that is a part of one of the kept blocks, or the whole of it."""
        for block in self._kept[saved.name]:
            first = [begin - origin for begin, origin in zip(saved.start, block.start, strict=True)]
            ends = [begin + size for begin, size in zip(first, saved.data.shape, strict=True)]
            if all(begin >= 0 for begin in first) and all(map(int.__le__, ends, block.data.shape)):
                part = block.data[tuple(map(slice, first, ends))]
                return replace(saved, data=part.contiguous())
        raise AssertionError(f"{saved.name}: no kept block contains the one that is saved at {saved.start}")


class _Arriving:
    """Sink of the blocks that are read (`ShardSink`); they get the type of the present ones."""

    def __init__(self, blocks: Collection[Shard], stored: StoredComponent) -> None:
        self._blocks = {(block.name, block.start): block for block in blocks}
        self._stored = stored
        self.arrived: list[Shard] = []

    def shard_requests(self) -> list[ShardRequest]:
        """Return requests in the type that was saved: a strategy may hold the weights in another one."""
        return [
            ShardRequest(
                block.name,
                block.global_shape,
                self._stored.dtype_of(block.name),
                block.start,
                tuple(block.data.shape),
            )
            for block in self._blocks.values()
        ]

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Take one of the requested blocks."""
        block = self._blocks[name, start]
        self.arrived.append(replace(block, data=tensor.to("cpu", block.data.dtype)))


def _by_name(blocks: Collection[Shard]) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for block in blocks:
        found.setdefault(block.name, []).append(block)
    return found


def _other_parameters(expected: Collection[str], stored: Collection[str]) -> CheckpointError:
    differing = sorted(set(expected) ^ set(stored))
    return CheckpointError(
        code="checkpoint.best_weights",
        what=f"the best weights of the checkpoint differ from the model in {len(differing)} of "
        f"{len(expected)} parameters, the first is {differing[0]}",
        where="state/best_weights",
        why="they belong to the model that is trained",
        do="resume with the model that the run was started with",
    )
