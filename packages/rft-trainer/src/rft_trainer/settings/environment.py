"""Settings of conversations with an environment. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EvalEnvironmentSettings:
    """The environment that answers the policy's turns. Without one, a response is one turn."""

    environment: str = ""
    """An environment's name (calculator, guess-number), or a class of your own as file.py:Class; empty = none."""

    environment_workers: int = field(default=1, metadata={"minimum": 1})
    """Processes that run a class of your own."""

    environment_memory: float = field(default=0.0, metadata={"minimum": 0.0})
    """GiB that each process of a class of your own may take; 0 = half of the machine's."""

    environment_variables: str = ""
    """Variables that a class of your own sees although their names are those of secrets (HF_TOKEN, AWS_*, ..._KEY),
    joined by commas, with * for any letters; empty = none."""

    max_turns: int = field(default=8, metadata={"minimum": 1})
    """Turns that the policy may take in a conversation."""

    turn_max_len: int | None = field(default=None, metadata={"minimum": 1})
    """Maximum length of one turn, in tokens; none = what is left of generate_max_len, which limits turns and
    observations together."""

    tool_timeout: float = field(default=10.0, metadata={"above": 0.0})
    """Seconds that a tool call may take (in a class of your own); a conversation that exceeds them has no reward."""

    rollout_timeout: float = field(default=60.0, metadata={"above": 0.0})
    """Seconds that the environment may take in a whole conversation (in a class of your own)."""

    tool_call_pattern: str = ""
    """Format of a tool call: a regular expression with the groups name and arguments; empty = JSON in <tool_call>."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(EvalEnvironmentSettings):
    """The environment that answers the policy's turns, and the discount between turns."""

    turn_gamma: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Discount from one turn to the next (gae); none = the same as gamma."""
