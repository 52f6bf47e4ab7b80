"""Continue an optimizer from a checkpoint, also where one of the two lacks averages or a loss scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rft.checkpoints.writer import ResumePoint
from rft_dist.checkpoint_format.shards import ShardRequest, ShardSink
from rft_dist.optim.adamw import is_optional


def restore_optimizer(optimizer: Any, restored: ResumePoint | None, component: str = "optimizer") -> None:
    """Load an optimizer's saved state, in shards where it takes them; without a checkpoint it is unchanged."""
    if restored is None:
        return
    if not hasattr(optimizer, "shard_requests"):
        optimizer.load_state_tensors(restored.checkpoint.tensors(component))
        return
    saved = restored.checkpoint.blocks(component).table.keys()
    restored.checkpoint.load(component, _WhatIsThere(optimizer, saved))


@dataclass(frozen=True, slots=True)
class _WhatIsThere:
    """Sink that requests every required tensor, and an optional one only if it was saved."""

    sink: ShardSink
    saved: Collection[str]

    def shard_requests(self) -> Sequence[ShardRequest]:
        """Return the requests of the sink, without optional tensors that were not saved."""
        return [each for each in self.sink.shard_requests() if each.name in self.saved or not is_optional(each.name)]

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Write a block to the sink (`ShardSink`)."""
        self.sink.write(name, start, tensor)
