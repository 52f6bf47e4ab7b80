"""Settings of the weight update, checkpoints, strategy and launch.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]
SequenceMode = Literal["auto", "ulysses", "ring"]


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
    """Checkpoint settings: the run's directory, when it is saved, and the checkpoint it continues from."""

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

    ckpt_weights_only: bool = False
    """Start a new run with the weights of the checkpoint in `ckpt_path`, all of them, and nothing else of it."""

    ckpt_partial: str = ""
    """Start a new run with weights of `ckpt_path` whose names begin so (by commas); the others are pretrain's."""

    max_ckpt_num: int = field(default=3, metadata={"minimum": 1})
    """Checkpoints kept; older ones are deleted after a newer one verifies."""

    max_ckpt_mem: int = field(default=1000, metadata={"minimum": 1})
    """Disk space for all checkpoints of the run, in GB (1e9 bytes); the newest is kept in any case."""

    async_save: bool = True
    """Copy the state and write it while training goes on; where memory does not hold the copy, training waits."""


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Strategy settings: the distribution of weights, gradients and moments over ranks and memory."""

    fsdp: bool = False
    """Spread weights, gradients and moments over the ranks (FSDP2); a layer is gathered while it computes."""

    shard_size: int | None = field(default=None, metadata={"minimum": 1})
    """Ranks that a weight is spread over, a divisor of their number (with `fsdp`); none = all of them."""

    fsdp_cpu_offload: bool = False
    """Keep the blocks, their gradients and moments in host memory and step there (with `fsdp`)."""

    zero_stage: int = field(default=0, metadata={"minimum": 0, "maximum": 3})
    """DeepSpeed: spread moments (1), gradients too (2), weights too (3) over the ranks; 0 = not DeepSpeed."""

    zpg: int = field(default=1, metadata={"minimum": 1})
    """Ranks of one machine that keep a second copy of the spread weights (with `zero_stage` 3); 1 = none."""

    overlap_comm: bool = False
    """Exchange gradients while the backward pass goes on (with `zero_stage` 1 to 3)."""

    sp_size: int = field(default=1, metadata={"minimum": 1})
    """Ranks that share every sequence: each holds a part of its tokens; a divisor of their number."""

    sp_mode: SequenceMode = "auto"
    """How attention is shared (with `sp_size`): by heads (ulysses), or keys go round (ring); auto = heads where they
    divide."""

    tp_size: int = field(default=1, metadata={"minimum": 1})
    """Ranks that hold parts of every matrix and compute together (tensor parallel); a divisor of their number."""

    adam_offload: bool = False
    """Keep the moments in host memory and step there; on a CPU they are there already."""

    use_mp_opt: bool = False
    """Compute in bfloat16, and keep weights, sums of gradients and moments in float32."""

    fp16: bool = False
    """Compute in float16 under a loss scale that adapts, and keep weights, sums of gradients and moments in float32."""

    meta_init: bool = False
    """Make the model without memory and let every rank read its blocks alone from the files (with `fsdp`)."""

    enable_ema: bool = False
    """Keep a moving average of the trained weights, in float32, in every checkpoint (`rft-train export --ema`)."""

    ema_decay: float = field(default=0.992, metadata={"minimum": 0.0, "below": 1.0})
    """What is left of the average after a step (with `enable_ema`)."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Launch settings: ranks and how they are started."""

    nproc: int = field(default=0, metadata={"minimum": 0})
    """Processes that are started on this machine, a GPU each where there are any; 0 = what torchrun or srun started,
    or this one."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """When a run that does not go on is ended, and what is compared over the ranks."""

    watchdog_seconds: float = field(default=3600.0, metadata={"minimum": 0.0})
    """Longest time without progress in one phase of a step (rollout, reward, train, save, ...); 0 = no limit."""

    watchdog_first_seconds: float = field(default=7200.0, metadata={"minimum": 0.0})
    """The same until the first step of this process has ended: loading and compiling; 0 = no limit."""

    watchdog_collective_seconds: float = field(default=600.0, metadata={"minimum": 0.0})
    """Longest time in one exchange between ranks that all of them have entered; 0 = no limit."""

    heartbeat_seconds: float = field(default=7.0, metadata={"minimum": 0.0})
    """A rank on another machine that says nothing for so long is taken for dead or cut off; 0 = never."""

    fingerprint_steps: int = field(default=3, metadata={"minimum": 0})
    """Steps in which the ranks compare every exchange before it is made; with --debug all of them; 0 = none."""
