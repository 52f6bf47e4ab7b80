"""Continue an optimizer from a checkpoint, also where one of the two lacks averages or a loss scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rft.checkpoints.writer import ResumePoint
from rft_dist.checkpoint_format.shards import ShardSink, Wanted
from rft_dist.optim.adamw import is_optional


def restore_optimizer(optimizer: Any, restored: ResumePoint | None, component: str = "optimizer") -> None:
    """Load an optimizer's saved state, in shards where it takes them; without a checkpoint it is unchanged."""
    if restored is None:
        return
    if not hasattr(optimizer, "wanted"):
        optimizer.load_state_tensors(restored.checkpoint.tensors(component))
        return
    saved = restored.checkpoint.blocks(component).table.keys()
    restored.checkpoint.load(component, _WhatIsThere(optimizer, saved))


@dataclass(frozen=True, slots=True)
class _WhatIsThere:
    """Sink that requests every required tensor, and an optional one only if it was saved."""

    sink: ShardSink
    saved: Collection[str]

    def wanted(self) -> Sequence[Wanted]:
        """Return the requests of the sink, without optional tensors that were not saved."""
        return [each for each in self.sink.wanted() if each.name in self.saved or not is_optional(each.name)]

    def put(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Write a block to the sink (`ShardSink`)."""
        self.sink.put(name, start, tensor)
