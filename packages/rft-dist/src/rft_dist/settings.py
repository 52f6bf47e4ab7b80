"""What a person chooses about the update of the weights and about checkpoints.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """The AdamW update and the shape of its learning rate."""

    lr_warmup_ratio: float = field(default=0.03, metadata={"minimum": 0.0, "maximum": 1.0})
    """Share of all steps in which the learning rate rises from 0 to its peak."""

    lr_schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up."""

    min_lr_ratio: float = field(default=0.1, metadata={"minimum": 0.0, "maximum": 1.0})
    """Learning rate at the last step, as a share of the peak (cosine and linear)."""

    adam_betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"minimum": 0.0, "below": 1.0})
    """Decay rates of Adam's two moments."""

    adam_epsilon: float = field(default=1e-8, metadata={"above": 0.0})
    """Added to the denominator of Adam's update."""

    l2: float = field(default=0.0, metadata={"minimum": 0.0})
    """Decoupled weight decay per unit of learning rate."""

    max_norm: float = field(default=1.0, metadata={"minimum": 0.0})
    """Gradients are scaled down to this L2 norm over all parameters; 0 = never."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(AdamSettings):
    """The update of the policy's weights."""

    actor_learning_rate: float = field(default=1e-6, metadata={"above": 0.0})
    """Peak learning rate of the policy."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where a run is kept, when it is saved, and what it continues from."""

    save_path: str = ""
    """Directory of this run; empty = runs/<run name>."""

    save_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between checkpoints; -1 or 0 = not by steps."""

    save_interval: int = field(default=1, metadata={"minimum": 0})
    """Episodes (in sft: epochs) between checkpoints; 0 = not by episodes."""

    save_minutes: float = field(default=10.0, metadata={"minimum": 0.0})
    """Minutes between checkpoints; 0 = not by time."""

    load_checkpoint: bool = False
    """Continue from the newest checkpoint that verifies, in `ckpt_path` or else in `save_path`."""

    ckpt_path: str = ""
    """What `load_checkpoint` continues from: a run, its checkpoints, step_N, episode_N or a file of one."""

    max_ckpt_num: int = field(default=3, metadata={"minimum": 1})
    """Checkpoints kept; older ones are deleted after a newer one verifies."""

    max_ckpt_mem: int = field(default=1000, metadata={"minimum": 1})
    """Disk space for all checkpoints of the run, in GB (1e9 bytes); the newest is kept in any case."""
