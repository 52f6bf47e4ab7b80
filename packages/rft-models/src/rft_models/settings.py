"""What a person chooses about the weights: which ones, how precise, where, and at what memory.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class WeightsSettings:
    """The weights to load, and where they live."""

    pretrain: str
    """Model to start from: a Hugging Face directory, or a name in the local Hugging Face cache."""

    bf16: bool = False
    """Hold and compute the weights in bfloat16 (half the memory); off = float32."""

    device: Device = "auto"
    """Where the model lives; auto = a CUDA GPU if there is one, else the CPU."""

    flash_attn: bool = False
    """Attend with the flash-attn library (a CUDA GPU and the extra `flash-attn`)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(WeightsSettings):
    """The model that is trained."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    fused_linear_logprob: bool = False
    """Compute the head and its log-probabilities in chunks of rows: the logits are never whole in memory."""

    chunk_size: int = field(default=4096, metadata={"minimum": 1})
    """Rows (tokens) of the head computed at once by `fused_linear_logprob`."""
