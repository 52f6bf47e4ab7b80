"""Schedule of the evaluation of the policy. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The schedule of evaluations on the held-out rows."""

    eval_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between evaluations, in addition to those at the start and the end; -1 = once an episode (epoch); 0 =
    never."""
