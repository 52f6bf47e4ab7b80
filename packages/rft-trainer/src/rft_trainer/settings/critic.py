"""The critic: its weights, learning rate and loss. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic, which gae needs."""

    critic_pretrain: str = ""
    """Model that the critic starts from; empty = as the policy."""

    critic_learning_rate: float = field(default=9e-6, metadata={"above": 0.0})
    """Peak learning rate of the critic."""

    value_clip: float = field(default=0.2, metadata={"minimum": 0.0})
    """How far a value may move from that at the start of the step before its loss stops to follow; 0 = no bound."""

    value_head_prefix: str = "score"
    """Name of the value head's weights in the critic's files."""

    save_value_network: bool = False
    """Write the critic as a Hugging Face directory into every checkpoint (its state is there in any case)."""

    freezing_actor_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps at the start in which only the critic is trained; -1 or 0 = none."""
