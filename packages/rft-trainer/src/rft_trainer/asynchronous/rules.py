"""How far rollouts run ahead, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AheadRules:
    """How far ahead, and how."""

    max_staleness: int
    deterministic: bool
    prompts_per_step: int
    max_steps: int
    """Steps of the whole run; 0 = until the ledger ends."""
    group_size: int
    seed: int
    patience: float = 1800.0
    """Seconds without any movement after which a wait is given up."""
