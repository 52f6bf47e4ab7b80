"""Settings of a loop of one's own: keyword arguments by the names of the flags of `rft-train rl`.

Only settings that have an effect in such a loop are taken. Defaults are those of the settings classes. No torch is
imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from rft.config.commands import RL
from rft.config.other_names import named_elsewhere
from rft.config.schema import build
from rft.library.keyword_settings import resolved
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_dist.settings import (
    AmpType,
    CheckpointSettings,
    CompileMode,
    OptimizerKind,
    OptimizerSettings,
    Schedule,
    SequenceMode,
    StrategySettings,
)
from rft_engine.settings import EngineSettings, SamplingSettings
from rft_models.settings import AdapterKind, AdapterSettings, CheckpointingMode, Device, ModelSettings
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.data import PromptTextSettings
from rft_trainer.settings.run import RunSettings


class LoopKeywords(TypedDict, total=False):
    """The settings of `rft.open_loop`, each as the flag of `rft-train rl` with its name."""

    bf16: bool
    model_code: str
    device: Device
    gradient_checkpointing: bool
    gradient_checkpointing_mode: CheckpointingMode
    gradient_checkpointing_every: int
    flash_attn: bool
    freeze_prefix: str
    train_only_tokens_from: int
    aux_loss_coef: float
    fused_linear_logprob: bool
    chunk_size: int
    lora_rank: int
    lora_alpha: float
    target_modules: str
    lora_type: AdapterKind
    load_in_4bit: bool
    input_template: str
    apply_chat_template: bool
    system_prompt: str
    micro_train_batch_size: int
    micro_rollout_batch_size: int
    max_tokens_per_micro_batch: int
    packing_samples: bool
    max_steps: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    prompt_max_len: int
    generate_max_len: int
    max_len: int | None
    engine_type: str
    engine_tp_size: int
    engine_mem_util: float | None
    engine_fp8: bool
    engine_max_rows: int
    engine_enforce_eager: bool
    enable_engine_sleep: bool
    actor_learning_rate: float
    optimizer: OptimizerKind
    lr_warmup_ratio: float
    lr_warmup_steps: int | None
    lr_schedule: Schedule
    lr_decay_ratio: float
    min_lr_ratio: float
    adam_betas: tuple[float, float]
    adam_epsilon: float
    l2: float
    lr_factors: str
    l2_factors: str
    max_norm: float
    fsdp: bool
    shard_size: int | None
    fsdp_cpu_offload: bool
    zero_stage: int
    zpg: int
    overlap_comm: bool
    sp_size: int
    sp_mode: SequenceMode
    tp_size: int
    adam_offload: bool
    use_mp_opt: bool
    fp16: bool
    amp: bool
    amp_dtype: AmpType
    compile: CompileMode
    meta_init: bool
    enable_ema: bool
    ema_decay: float
    max_ckpt_num: int
    max_ckpt_mem: int
    seed: int
    debug: bool
    max_refused_steps: int
    max_rows_set_aside: int
    max_norm_spike: float


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings from which policy and trainer are built; `LoopKeywords` lists those that are read."""

    model: ModelSettings
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    prompt: PromptTextSettings = field(default_factory=PromptTextSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    run: RunSettings = field(default_factory=RunSettings)


def loop_settings(pretrain: str | Path, keywords: Mapping[str, object]) -> LoopSettings:
    """Return the settings that keywords give, with the defaults of the others.

    They are checked as those of `rft-train rl`, of which they are a part.

    Raises:
        SettingsError: a value that is not allowed, or settings that exclude one another.
        OptionsError: a name that is no setting of a loop, or a setting that has no effect beside the others.
    """
    known = list(LoopKeywords.__annotations__)
    for name in keywords:
        if name not in known:
            raise _unknown(name, keywords[name], known)
    found = resolved(RL.name, {"pretrain": str(pretrain), **keywords})
    if found.notes:
        raise _without_effect(found.notes[0])
    return build(LoopSettings, found.values)


def _unknown(name: str, value: object, known: list[str]) -> OptionsError:
    if "n_samples_per_prompt" in named_elsewhere(name):
        return OptionsError(
            code="loop.of_the_call",
            what=f"open_loop was given {name}={value!r}",
            where="rft.open_loop",
            why="how many completions a prompt has is said where they are sampled",
            do=f"policy.sample(prompts, n={value})",
        )
    near = next((other for other in named_elsewhere(name) if other in known), "")
    nearest = [near] if near else nearest_names(name, known, count=1)
    return OptionsError(
        code="loop.unknown_setting",
        what=f"open_loop was given {name}={value!r}",
        where="rft.open_loop",
        why="it takes settings by the names of their flags where they have an effect here (`LoopKeywords` lists them)",
        do=f"{nearest[0]}={value!r}" if nearest else f"leave {name} out",
    )


def _without_effect(note: str) -> OptionsError:
    return OptionsError(
        code="loop.no_effect",
        what=note,
        where="rft.open_loop",
        why="a setting has an effect or is refused; none is ignored",
        do=f"leave {note.partition(' = ')[0]} out",
    )
