"""The number that a float16 loss is multiplied with, so that small gradients are not rounded to zero.

    S * loss goes backward;  g <- g / S before anything looks at it
    g not finite on any rank:      the step is skipped on all of them, S <- S / 2, at once
    `growth_interval` finite steps: S <- 2 S

(Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.) S is always a power of two, so
dividing by it changes no digit. One scale holds for a whole optimizer step: all its micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_core.errors import NumericsError

KEY = "loss_scale"
"""The scaler among the tensors of an optimizer's state."""
LARGEST = 2.0**24


@dataclass(slots=True)
class LossScaler:
    """The scale in force, and how it follows what the steps find.

    Example::

        scaler = LossScaler()
        scaler.scaled(loss).backward()
        scaler.unscale([w.grad])
        scaler.update(finite=bool(w.grad.isfinite().all()))
    """

    scale: float = 2.0**16
    """Multiplies every loss of the present step; a power of two."""
    growth_interval: int = 1000
    """Finite steps in a row after which the scale doubles."""
    floor: float = 1.0
    """Smallest scale: an overflow there is not one of the scale, and ends the run."""
    clean_steps: int = 0
    """Finite steps since the scale last changed."""
    skipped: int = 0
    """Steps that were skipped, in all."""

    def __post_init__(self) -> None:
        assert math.frexp(self.scale)[0] == 0.5, f"the scale {self.scale} is not a power of two"

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that goes backward, in float32 at least."""
        # widened before the product: the first scale, 65536, is above what float16 holds already
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        return wide * self.scale

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale out of summed gradients (float32 or float64), in place."""
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)

    def update(self, *, finite: bool) -> None:
        """Take notice of a step, which is the same on every rank.

        Raises:
            NumericsError: a gradient was not finite at the smallest scale.
        """
        if finite:
            self.clean_steps += 1
            if self.clean_steps >= self.growth_interval and self.scale < LARGEST:
                self.scale, self.clean_steps = 2 * self.scale, 0
            return
        self.skipped += 1
        if self.scale / 2 < self.floor:
            raise _exhausted(self.scale, self.skipped)
        self.scale, self.clean_steps = self.scale / 2, 0

    def state_tensors(self) -> dict[str, Tensor]:
        """ "loss_scale": [3] float64: scale, finite steps since it changed, steps skipped."""
        return {KEY: torch.tensor([self.scale, self.clean_steps, self.skipped], dtype=torch.float64)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`; where it is missing, as now."""
        if KEY in tensors:
            scale, clean, skipped = tensors[KEY].tolist()
            self.scale, self.clean_steps, self.skipped = scale, int(clean), int(skipped)


class NoLossScaler:
    """Stand-in for `LossScaler` where no loss scaling is needed."""

    scale: float | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged."""
        return loss

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Leave the gradients unchanged."""

    def update(self, *, finite: bool) -> None:
        """Ignore the outcome of the step."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Ignore a saved loss scale."""


def _exhausted(scale: float, skipped: int) -> NumericsError:
    return NumericsError(
        code="numerics.loss_scale",
        what=f"a gradient is not finite at a loss scale of {scale:g}; {skipped} steps were skipped before that",
        where="the loss scale of float16",
        why="the scale cannot be made smaller: the loss or the activations themselves exceed the largest float16 "
        "(65504)",
        state="weights and moments are those of the last step that was applied",
        do="train in bfloat16, which has the range of float32: --use_mp_opt, or --amp --amp_dtype bf16",
    )
