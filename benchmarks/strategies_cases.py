"""The cases of `strategies.py`: names, settings, and how near their gradient has to be to that of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROUNDED = 0.05
"""bfloat16 has 8 bits; the norm of a gradient is an average over many numbers."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    ranks: int = 2
    strategy: dict[str, Any] = field(default_factory=dict[str, Any])
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = 1e-4
    on_gpu: bool = False


def _one(name: str, **settings: Any) -> Case:
    """A case of one process."""
    model = {key: settings.pop(key) for key in list(settings) if key.startswith(("bf16", "gradient"))}
    rounded = bool({"bf16"} & model.keys() or {"use_mp_opt", "fp16"} & settings.keys())
    return Case(name, 1, settings, model, ROUNDED if rounded else 1e-4, on_gpu=True)


def _two(name: str, **settings: Any) -> Case:
    """A case of two ranks."""
    case = _one(name, **settings)
    return Case(name, 2, case.strategy, case.model, case.tolerance)


CASES = (
    _one("one process"),
    _one("--gradient_checkpointing", gradient_checkpointing=True),
    _one("--gradient_checkpointing selective", gradient_checkpointing=True, gradient_checkpointing_mode="selective"),
    _one("--bf16", bf16=True),
    _one("--use_mp_opt", use_mp_opt=True),
    _one("--fp16", fp16=True),
    _one("--enable_ema", enable_ema=True),
    _one("--adam_offload", adam_offload=True),
    _one("FSDP --fsdp_cpu_offload", fsdp=True, fsdp_cpu_offload=True),
    _two("replicas"),
    _two("replicas --adam_offload", adam_offload=True),
    _two("FSDP", fsdp=True),
    _two("FSDP --meta_init", fsdp=True, meta_init=True),
    _two("FSDP --shard_size 1 (hybrid)", fsdp=True, shard_size=1),
    _two("FSDP --fsdp_cpu_offload, two", fsdp=True, fsdp_cpu_offload=True),
    _two("FSDP --use_mp_opt", fsdp=True, use_mp_opt=True),
    _two("FSDP --fp16", fsdp=True, fp16=True),
    _two("FSDP --gradient_checkpointing", fsdp=True, gradient_checkpointing=True),
    _two("ZeRO 1", zero_stage=1),
    _two("ZeRO 2", zero_stage=2),
    _two("ZeRO 3", zero_stage=3),
    _two("ZeRO 3 --adam_offload", zero_stage=3, adam_offload=True),
    _two("ZeRO 2 --use_mp_opt", zero_stage=2, use_mp_opt=True),
    _two("--sp_size 2", sp_size=2),
    _two("FSDP --sp_size 2", fsdp=True, sp_size=2),
    _two(
        "the low-memory recipe",
        fsdp=True,
        fsdp_cpu_offload=True,
        adam_offload=True,
        use_mp_opt=True,
        gradient_checkpointing=True,
    ),
)
