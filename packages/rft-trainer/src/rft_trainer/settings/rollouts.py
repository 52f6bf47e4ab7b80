"""Settings of rollouts that run ahead of the trainer. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """Asynchronous rollouts, which run ahead of the trainer."""

    max_staleness: int = field(default=0, metadata={"minimum": 0})
    """Maximum number of weight versions between sampling and training: rollouts of that many future steps are sampled
    while the trainer trains; 0 = each step waits for its own rollouts."""

    async_deterministic: bool = False
    """With max_staleness: sample each step completely with the weights of exactly that many steps before, so that a run
    can be repeated to the bit; off = running samples continue under each new version, which is faster."""
