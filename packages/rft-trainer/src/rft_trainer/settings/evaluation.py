"""When the policy is evaluated, and on how much. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When the held-out rows are scored."""

    eval_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between evaluations, beside those at the start and the end; -1 = once an episode (epoch); 0 = never."""
