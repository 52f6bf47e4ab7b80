"""How many engines draw. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """Engines side by side."""

    engine_replicas: int = field(default=1, metadata={"minimum": 1})
    """Engines that share the prompts of a step between them, each a process with the whole weights, for every rank;
    their number changes no token. 1 = one engine, which shares the trainer's process and weights where it can."""
