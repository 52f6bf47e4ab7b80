"""Settings of rollouts that run ahead of the trainer. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """Asynchronous rollouts, which run ahead of the trainer."""

    max_staleness: int = field(default=0, metadata={"minimum": 0})
    """Weight versions that a sample may lag when it is trained: rollouts of so many steps to come are drawn while the
    trainer trains; 0 = none, each step waits for its own."""

    async_deterministic: bool = False
    """With max_staleness: a step's samples are drawn whole with the weights of exactly that many steps before, so
    that a run repeats to the bit; without it running samples go on under every new version, which is faster."""
