"""Checksums of weights and optimizer state: a bit that changed by itself is found before it is saved for good.

Every `every` steps, after the last update of the step, each rank adds up the bits of what it trains as integers (modulo
2^64: one changed bit always changes the sum). Ranks that keep the same weights must have the same sum; and what
no update has touched must have, at the beginning of the next step, the sum that it had at the end of the last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rft_core.errors import NumericsError
from rft_trainer.metrics.weight_change import bit_sum
from rft_trainer.protocols import Collectives

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(slots=True, kw_only=True)
class WeightCheck:
    """Comparison of checksums between ranks and between steps.

    Raises `NumericsError` on every rank: it names the tensor, and the ranks that differ from most others.
    """

    tensors: NamedTensors
    """Weights and moments, as this rank keeps them."""
    collectives: Collectives
    every: int
    """Steps between two comparisons; 0 = none."""
    replicated: bool
    """Whether every rank keeps the same tensors; otherwise each is compared with itself alone."""
    remedy: str
    _kept: dict[str, int] = field(default_factory=dict[str, int])

    def after(self, step: int, saved_step: int | None) -> None:
        """Compare the ranks after the last update of `step`, where it is due."""
        self._kept = {}
        if not self.every or step % self.every:
            return
        self._kept = checksums(self.tensors())
        if not self.replicated or self.collectives.world_size == 1:
            return
        everyones = [json.loads(part) for part in self.collectives.gather_bytes(json.dumps(self._kept).encode())]
        differing = [name for name in self._kept if len({sums.get(name) for sums in everyones}) > 1]
        if differing:
            name = differing[0]
            usual = Counter(sums.get(name) for sums in everyones).most_common(1)[0][0]
            ranks = [rank for rank, sums in enumerate(everyones) if sums.get(name) != usual]
            shown = f"rank {', '.join(map(str, ranks))}" if len(everyones) > 2 else "one of two ranks"
            raise self._error(step, saved_step, len(differing), name, f"{shown} differs from the others")

    def before(self, step: int, saved_step: int | None) -> None:
        """Compare with the end of the step before: nothing may have changed since."""
        changed: list[str] = []
        if self._kept:
            now = checksums(self.tensors())
            changed = [name for name, kept in self._kept.items() if now.get(name) != kept]
        if self.every and step % self.every == 0 and step:
            # every rank asks, so that all raise where memory changed on one
            bad = torch.tensor(len(changed))
            most = int(self.collectives.max(bad)) if self.collectives.world_size > 1 else int(bad)
            if most:
                name = changed[0] if changed else "a tensor of another rank"
                raise self._error(step, saved_step, most, name, "it changed while nothing was trained")

    def forget(self) -> None:
        """Take no notice of what was compared last, where weights are replaced on purpose."""
        self._kept = {}

    def _error(self, step: int, saved_step: int | None, number: int, name: str, how: str) -> NumericsError:
        return NumericsError(
            code="numerics.memory",
            what=f"{number} tensors do not have the bits that they should have, the first is {name}: {how}",
            where=f"rank {self.collectives.rank}, step {step} (--weight_check_steps {self.every})",
            why="memory or arithmetic of a device is at fault; what is trained from here is another model",
            state=f"last checkpoint: step {saved_step}; it is older than the fault where every save follows a check",
            do=self.remedy,
        )


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the sum of the bits of each tensor, read as integers of its element size, modulo 2^64."""
    sums: dict[str, int] = {}
    for name, tensor in tensors:
        local = getattr(tensor, "to_local", None)
        sums[name] = bit_sum(tensor if local is None else local())
    return sums
