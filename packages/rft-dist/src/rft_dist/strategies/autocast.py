"""The type in which a forward computes beside float32 weights (`--amp`), by what the ranks' devices can.

Under autocast each product rounds its two factors, and weights, sums of the residual stream, norms and gradients stay
float32 (Micikevicius et al., "Mixed precision training", ICLR 2018). bfloat16 has the range of float32; float16 has
not, so that its losses are scaled (`optim.loss_scaler`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rft_dist.collectives import Collectives
from rft_dist.optim.cpu_products import cpu_multiplies_bf16
from rft_dist.settings import StrategySettings

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ORDER = ("bf16", "fp16", "off")
"""From what needs the most of a device to what needs nothing."""


@dataclass(frozen=True, slots=True)
class ComputeType:
    """Type in which the forward of a run computes, and why."""

    name: str
    """bf16, fp16 or off."""
    reason: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the products; None = that of the weights."""
        return TYPES.get(self.name)


def compute_type(settings: StrategySettings, device: torch.device, collectives: Collectives) -> ComputeType:
    """Return what the forward computes in, the same on every rank; a type that is asked for is taken at its word."""
    if not settings.amp:
        return ComputeType("off", "not asked for")
    if settings.amp_dtype != "auto":
        return ComputeType(settings.amp_dtype, "asked for by --amp_dtype")
    own = of_device(device)
    # the ranks step together, so they compute in what all of them can
    worst = int(collectives.max(torch.tensor(_ORDER.index(own.name))).item())
    if _ORDER[worst] == own.name:
        return own
    return ComputeType(_ORDER[worst], f"another rank has no {own.name}")


def of_device(device: torch.device) -> ComputeType:
    """Return the type that a device multiplies faster than float32."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return ComputeType("bf16", f"{name} multiplies bfloat16")
        return ComputeType("fp16", f"{name} multiplies no bfloat16; losses are scaled")
    if cpu_multiplies_bf16():
        return ComputeType("bf16", "this CPU multiplies bfloat16")
    return ComputeType("off", "this CPU multiplies no bfloat16: float32 is faster")
