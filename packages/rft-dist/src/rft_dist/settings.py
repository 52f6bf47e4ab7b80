"""Settings of the weight update, checkpoints, strategy and launch.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rft_core.errors import SettingsRefusal

Factors = tuple[tuple[str, float], ...]
"""(name or pattern of parameters, factor) of each entry of a setting such as `lr_factors`."""
FACTOR_SETTINGS = ("lr_factors", "l2_factors")
"""The settings that have `Factors`."""
Schedule = Literal["cosine", "linear", "constant", "wsd"]
OptimizerKind = Literal["adamw", "muon"]
CompileMode = Literal["auto", "on", "off"]
AmpType = Literal["auto", "bf16", "fp16"]
SequenceMode = Literal["auto", "ulysses", "ring"]


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """The update of AdamW or Muon and the shape of its learning rate."""

    optimizer: OptimizerKind = "adamw"
    """What steps on the weights: adamw; or muon, orthogonalised momentum, on the matrices of the layers, and AdamW on
    all else with the same rate."""

    lr_warmup_ratio: float = field(default=0.03, metadata={"minimum": 0.0, "maximum": 1.0})
    """Fraction of all steps in which the learning rate rises from 0 to its peak."""

    lr_warmup_steps: int | None = field(default=None, metadata={"minimum": 0})
    """Steps in which the learning rate rises, at most all of them; none = by `lr_warmup_ratio`."""

    lr_schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up (wsd: at the end alone)."""

    lr_decay_ratio: float = field(default=0.2, metadata={"minimum": 0.0, "maximum": 1.0})
    """Fraction of all steps, the last ones, in which the learning rate falls in a line (with `lr_schedule` wsd)."""

    min_lr_ratio: float = field(default=0.1, metadata={"minimum": 0.0, "maximum": 1.0})
    """Learning rate at the last step, as a fraction of the peak (all but constant)."""

    adam_betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"minimum": 0.0, "below": 1.0})
    """Decay rates of Adam's two moments."""

    adam_epsilon: float = field(default=1e-8, metadata={"above": 0.0})
    """Added to the denominator of Adam's update."""

    l2: float = field(default=0.0, metadata={"minimum": 0.0})
    """Decoupled weight decay per unit of learning rate; norms, biases and embeddings have none."""

    lr_factors: str = ""
    """Parts of the model with a learning rate of their own, NAME=FACTOR joined by commas, such as
    model.visual=0.1,lm_head=0.5: a name, all names below it, or a pattern with *; empty = one rate for all."""

    l2_factors: str = ""
    """Parts of the model with a weight decay of their own (with `l2`), as in `lr_factors`: model.embed_tokens=1 decays
    the embeddings too."""

    max_norm: float = field(default=1.0, metadata={"minimum": 0.0})
    """Clip the gradients to this L2 norm over all parameters; 0 = do not clip."""


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

    fallback_save_path: str = ""
    """Directory on another file system for checkpoints that the one of `save_path` refuses (disk full, quota,
    read-only, input or output error), in a folder of this run; empty = none."""

    save_steps: int = field(default=-1, metadata={"minimum": -1})
    """Steps between checkpoints; -1 or 0 = none by steps."""

    save_interval: int = field(default=1, metadata={"minimum": 0})
    """Episodes (in sft: epochs) between checkpoints; 0 = none by episodes."""

    save_minutes: float = field(default=10.0, metadata={"minimum": 0.0})
    """Minutes between checkpoints; 0 = none by time."""

    load_checkpoint: bool = False
    """Continue from the newest checkpoint that verifies, in `ckpt_path` or else in `save_path`."""

    ckpt_path: str = ""
    """What `load_checkpoint` continues from: a run, its checkpoints directory, step_N, episode_N or a file inside
    one."""

    ckpt_weights_only: bool = False
    """Start a new run from the weights of the checkpoint in `ckpt_path`, all of them, and nothing else of it."""

    ckpt_partial: str = ""
    """Start a new run from those weights of `ckpt_path` whose names begin so (joined by commas); the others come from
    `pretrain`."""

    accept_changes: str = ""
    """Differences from what the run records that are taken knowingly where it goes on, joined by commas, such as
    reward,tokenizer; the refusal of a changed run names them; empty = none."""

    max_ckpt_num: int = field(default=3, metadata={"minimum": 1})
    """Number of checkpoints to keep; older ones are deleted after a newer one has been verified."""

    max_ckpt_mem: int = field(default=1000, metadata={"minimum": 1})
    """Maximum disk space of all checkpoints of the run, in GB (1e9 bytes); the newest is kept in any case."""

    save_model_only: bool = False
    """Save the model alone, without the optimizer's state and the rest that a resume needs: a fraction of the disk, and
    such a checkpoint cannot be resumed from, only be the start of a new run."""

    async_save: bool = True
    """Copy the state and write it while training continues; where memory does not hold the copy, training waits."""


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Strategy settings: the distribution of weights, gradients and moments over ranks and memory."""

    fsdp: bool = False
    """Shard weights, gradients and moments over the ranks (FSDP2); a layer is gathered while it computes."""

    shard_size: int | None = field(default=None, metadata={"minimum": 1})
    """Number of ranks that a weight is sharded over, a divisor of their total (with `fsdp`); none = all of them."""

    fsdp_cpu_offload: bool = False
    """Keep the shards, their gradients and moments in host memory and run the optimizer there (with `fsdp`)."""

    zero_stage: int = field(default=0, metadata={"minimum": 0, "maximum": 3})
    """DeepSpeed ZeRO stage: shard the moments (1), the gradients too (2), the weights too (3); 0 = no DeepSpeed."""

    zpg: int = field(default=1, metadata={"minimum": 1})
    """Number of ranks of one machine that keep a second copy of the sharded weights (with `zero_stage` 3); 1 = none."""

    overlap_comm: bool = False
    """Reduce gradients while the backward pass continues (with `zero_stage` 1 to 3)."""

    sp_size: int = field(default=1, metadata={"minimum": 1})
    """Sequence-parallel ranks: each holds a part of the tokens of every sequence; a divisor of the number of ranks."""

    sp_mode: SequenceMode = "auto"
    """How attention is shared (with `sp_size`): by heads (ulysses) or by passing keys around (ring); auto = by heads
    where their number divides."""

    tp_size: int = field(default=1, metadata={"minimum": 1})
    """Tensor-parallel ranks: each holds a part of every matrix and they compute together; a divisor of the number of
    ranks."""

    ep_size: int = field(default=1, metadata={"minimum": 1})
    """Expert-parallel ranks: each holds a part of the experts of every layer, and tokens are sent to them; a divisor of
    the number of ranks and of the number of experts."""

    adam_offload: bool = False
    """Keep the moments in host memory and run the optimizer there; on a CPU they are there already."""

    use_mp_opt: bool = False
    """Compute in bfloat16 and keep weights, gradient sums and moments in float32."""

    fp16: bool = False
    """Compute in float16 with an adaptive loss scale and keep weights, gradient sums and moments in float32."""

    amp: bool = False
    """Compute the products of layers and head in fewer bits (autocast), and keep float32 weights, sums, norms and
    gradients."""

    amp_dtype: AmpType = "auto"
    """What they are computed in (with `amp`); auto = bfloat16 where the device multiplies it, else float16 with an
    adaptive loss scale on a GPU, float32 on a CPU."""

    compile: CompileMode = "off"
    """Compile the layers one by one, where gradients are taken; auto = on a GPU, unless ranks exchange in each layer.
    Layers that do not compile, or compute something else then, stay as they are, and a warning says why."""

    meta_init: bool = False
    """Create the model without allocating memory and let each rank read its own shards from the files (with `fsdp`)."""

    enable_ema: bool = False
    """Keep a moving average of the trained weights, in float32, in every checkpoint (`rft-train export --ema`)."""

    ema_decay: float = field(default=0.992, metadata={"minimum": 0.0, "below": 1.0})
    """Decay of the moving average per step (with `enable_ema`)."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Launch settings: ranks and how they are started."""

    nproc: int = field(default=0, metadata={"minimum": 0})
    """Processes to start on this machine, one per GPU if there are any; 0 = those that torchrun or srun has started, or
    this one alone."""

    restarts: int = field(default=0, metadata={"minimum": 0})
    """Times in a row that a run whose process dies is started again from its newest checkpoint; a newer checkpoint
    begins the count again; 0 = it is not started again."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """When a run that does not go on is ended, and what is compared over the ranks."""

    watchdog_seconds: float = field(default=3600.0, metadata={"minimum": 0.0})
    """Maximum time without progress in one phase of a step (rollout, reward, train, save, ...); 0 = no limit."""

    watchdog_first_seconds: float = field(default=7200.0, metadata={"minimum": 0.0})
    """The same limit until the first step of this process has ended, which includes loading and compiling; 0 = no
    limit."""

    watchdog_collective_seconds: float = field(default=600.0, metadata={"minimum": 0.0})
    """Maximum time in one collective that all ranks have entered; 0 = no limit."""

    heartbeat_seconds: float = field(default=7.0, metadata={"minimum": 0.0})
    """Seconds without a heartbeat after which a rank on another machine counts as dead or cut off; 0 = never."""

    fingerprint_steps: int = field(default=3, metadata={"minimum": 0})
    """Number of first steps in which the ranks compare every collective before they run it; with --debug all of them; 0
    = none."""


def factors_of(setting: str, text: str) -> Factors:
    """Parse NAME=FACTOR joined by commas; later entries hold before earlier ones.

    Raises:
        OptionsError: an entry of another form, or a factor that is not finite and at least 0.
    """
    refusal = factors_refusal(setting, text)
    if refusal is not None:
        raise refusal.as_error({setting: text})
    return tuple((name, float(factor)) for name, factor in _entries(text))


def factors_refusal(setting: str, text: str) -> SettingsRefusal | None:
    """Return the refusal of a text that `factors_of` cannot read; None where it can."""
    for name, factor in _entries(text):
        if name and _is_factor(factor):
            continue
        return SettingsRefusal(
            code="optimizer.factor",
            names=(setting,),
            why=f"{name}={factor} is not a name and a factor of at least 0" if factor else f"{name!r} has no factor",
            do=f"--{setting} {name or 'model.embed_tokens'}=0.1",
        )
    return None


def _entries(text: str) -> list[tuple[str, str]]:
    parts = (part.strip() for part in text.split(","))
    cut = (part.partition("=") for part in parts if part)
    return [(name.strip(), factor.strip()) for name, _, factor in cut]


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
