"""What a person chooses about adapters: how many weights are trained beside the model's own, and where.

Metadata keys of a field as in `rft_models.settings`. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AdapterKind = Literal["lora", "rslora", "dora"]


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Low-rank adapters, trained in place of the model's weights."""

    lora_rank: int = field(default=0, metadata={"minimum": 0})
    """Rank of the adapters that are trained while the model's own weights stay; 0 = all weights, no adapters."""

    lora_alpha: float = field(default=16.0, metadata={"above": 0.0})
    """Scale of the adapters: alpha / rank times their product (`lora_type` rslora: alpha / sqrt(rank))."""

    lora_dropout: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 0.95})
    """Share of an adapter's inputs that a training forward zeroes (`rft-train sft` alone)."""

    target_modules: str = "all-linear"
    """Layers that get an adapter: all-linear, or ends of their names joined by commas, as q_proj,v_proj."""

    lora_type: AdapterKind = "lora"
    """lora; rslora scales by 1 / sqrt(rank); dora also trains the length of each row of the matrix."""

    load_in_4bit: bool = False
    """Hold the weights under the adapters in 4 bits (NF4 of bitsandbytes, on a GPU)."""
