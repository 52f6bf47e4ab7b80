"""The critic: its weights, learning rate and loss. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic, which gae needs."""

    critic_pretrain: str = ""
    """Model that the critic is initialized from, a directory or ORG/NAME[@REVISION]; empty = the policy's."""

    critic_learning_rate: float = field(default=9e-6, metadata={"above": 0.0})
    """Peak learning rate of the critic."""

    value_clip: float = field(default=0.2, metadata={"minimum": 0.0})
    """Distance from its value at the start of the step beyond which a value receives no gradient; 0 = no limit."""

    value_head_prefix: str = "score"
    """Prefix of the value head's weights in the critic's files."""

    save_value_network: bool = False
    """Write the critic as a Hugging Face directory into every checkpoint (its training state is saved in any case)."""

    freezing_actor_steps: int = field(default=-1, metadata={"minimum": -1})
    """Number of first steps that train only the critic; -1 or 0 = none."""
