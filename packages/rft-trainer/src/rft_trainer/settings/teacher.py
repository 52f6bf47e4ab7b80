"""The teacher of on-policy distillation. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """A model whose log-probs of the policy's own responses are learned from, token by token."""

    teacher_pretrain: str = ""
    """Teacher: a directory or ORG/NAME[@REVISION], with the tokenizer of the policy; beside it no reward is needed;
    empty = none."""

    teacher_kl_coef: float = field(default=1.0, metadata={"above": 0.0})
    """Weight of the reverse KL to the teacher: its log-prob of a token minus the policy's, times this, is added to the
    advantage of the token, less its mean over the other responses (with `teacher_pretrain`)."""
