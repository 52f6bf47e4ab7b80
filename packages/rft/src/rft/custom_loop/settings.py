"""Settings of a loop of one's own: keyword arguments by the names of the flags of `rft-train rl`.

Only settings that have an effect in such a loop are taken. Defaults are those of the settings classes. No torch is
imported here.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Union, cast, get_args, get_origin, get_type_hints

from rft.custom_loop.exclusions import refuse_contradictions
from rft.resolved import flat
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
from rft_dist.settings import CheckpointSettings, OptimizerSettings, Schedule, SequenceMode, StrategySettings
from rft_engine.settings import EngineSettings, SamplingSettings
from rft_models.settings import AdapterKind, AdapterSettings, CheckpointingMode, Device, ModelSettings
from rft_trainer.settings.batches import BatchSettings
from rft_trainer.settings.data import PromptTextSettings
from rft_trainer.settings.run import RunSettings

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("of at least", operator.ge),
    "maximum": ("of at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}
"""Metadata of a number to the words for it, and the comparison that holds."""


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
    lora_dropout: float
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
    lr_warmup_ratio: float
    lr_schedule: Schedule
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

    Raises:
        OptionsError: a name that is no setting of a loop, a value out of its range, or settings that exclude one
            another.
    """
    known = list(LoopKeywords.__annotations__)
    for name in keywords:
        if name not in known:
            raise _unknown(name, keywords[name], known)
    settings = LoopSettings(model=ModelSettings(pretrain=str(pretrain)))
    for group in fields(settings):
        part: Any = getattr(settings, group.name)
        hints = get_type_hints(part.__class__)
        given: dict[str, Any] = {}
        for item in fields(part):
            if item.name in keywords:
                given[item.name] = _checked(item.name, keywords[item.name], hints[item.name], item.metadata)
        settings = replace(settings, **{group.name: replace(part, **given)})
    refuse_contradictions(flat(settings), keywords)
    return settings


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the value in the type of the setting."""
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    base = next(one for one in allowed if one is not type(None))
    if get_origin(base) is Literal:
        if value not in get_args(base):
            raise _not_allowed(name, value, f"one of {', '.join(map(str, get_args(base)))}")
        return value
    if get_origin(base) is tuple:
        parts = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else ()
        if len(parts) != len(get_args(base)):
            raise _not_allowed(name, cast("object", value), f"{len(get_args(base))} numbers")
        return tuple(_number(name, part, float, metadata) for part in parts)
    if base in (int, float):
        return _number(name, value, base, metadata)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, base):
        raise _not_allowed(name, value, {bool: "True or False", str: "text"}[base])
    return value


def _number(name: str, value: Any, base: type, metadata: Mapping[str, Any]) -> Any:
    noun = "a whole number" if base is int else "a number"
    fits = isinstance(value, int) if base is int else isinstance(value, int | float)
    if isinstance(value, bool) or not fits or not math.isfinite(value):
        raise _not_allowed(name, value, noun)
    for key, (words, holds) in _BOUNDS.items():
        if key in metadata and not holds(value, metadata[key]):
            raise _not_allowed(name, value, f"{noun} {words} {metadata[key]:g}")
    return base(value)


def _unknown(name: str, value: object, known: list[str]) -> OptionsError:
    near = nearest_names(name, known, count=1)
    return OptionsError(
        code="loop.unknown_setting",
        what=f"open_loop was given {name}={value!r}",
        where="rft.open_loop",
        why="it takes settings by the names of their flags where they have an effect here (`LoopKeywords` lists them)",
        do=f"{near[0]}={value!r}" if near else f"leave {name} out",
    )


def _not_allowed(name: str, value: object, allowed: str) -> OptionsError:
    return OptionsError(
        code="loop.setting_value",
        what=f"{name} = {value!r}",
        where="rft.open_loop",
        why=f"{name} is {allowed}",
        do=f"{name}=<{allowed}>",
    )
