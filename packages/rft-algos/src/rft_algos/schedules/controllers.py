"""Coefficients that follow what they control. Torch-free.

A controller is a record. `updated` gives the next one, so that a run's state is the record itself:
plain numbers, for JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rft_algos.input_checks import refuse


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A KL coefficient that steers the divergence towards a target.

    beta' = beta (1 + clip(KL / target - 1, -0.2, 0.2) * num_samples / horizon).

    Source: Ziegler et al. 2019 (arXiv 1909.08593).

    Example: `AdaptiveKl(0.1, target=6.0).updated(kl=12.0, num_samples=1000)` has the coefficient
    0.1 * (1 + 0.2 * 1000 / 10000) = 0.102.
    """

    coefficient: float
    """beta, in reward per nat."""
    target: float
    """Divergence to hold, in the unit of `kl`, positive."""
    horizon: float = 10_000
    """Samples over which a constant error of 20 % or more changes the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if not self.target > 0:
            refuse(f"target must be positive, it is {self.target}")
        if not self.horizon > 0:
            refuse(f"horizon must be positive, it is {self.horizon}")

    def updated(self, kl: float, num_samples: int) -> AdaptiveKl:
        """The controller after `num_samples` sequences of mean divergence `kl`."""
        if not math.isfinite(kl):
            refuse(f"kl must be finite, it is {kl}")
        error = min(0.2, max(-0.2, kl / self.target - 1.0))
        return replace(self, coefficient=self.coefficient * (1.0 + error * num_samples / self.horizon))


@dataclass(frozen=True, slots=True)
class EntropyTarget:
    """An entropy coefficient that grows while the entropy is below a target and shrinks while above.

    c' = min(c + step, maximum) where H < target, max(c - step, 0) where H > target, c at the target.

    Source: He et al. 2025, "Skywork Open Reasoner 1" (arXiv 2505.22312).

    Example: `EntropyTarget(0.0, target=0.2).updated(0.1)` has the coefficient 0.005.
    """

    coefficient: float
    """Weight of the entropy bonus, in loss per nat."""
    target: float
    """Entropy to hold, in nats a token."""
    step: float = 0.005
    """Change of the coefficient at an update."""
    maximum: float = 1.0
    """Largest coefficient."""

    def __post_init__(self) -> None:
        if not self.step >= 0:
            refuse(f"step must not be negative, it is {self.step}")
        if not 0 <= self.coefficient <= self.maximum:
            refuse(f"{self.coefficient} is not within 0 and {self.maximum}")

    def updated(self, entropy: float) -> EntropyTarget:
        """The controller after an optimizer step of mean entropy `entropy`."""
        if not math.isfinite(entropy):
            refuse(f"entropy must be finite, it is {entropy}")
        if entropy < self.target:
            return replace(self, coefficient=min(self.coefficient + self.step, self.maximum))
        if entropy > self.target:
            return replace(self, coefficient=max(self.coefficient - self.step, 0.0))
        return self

    def applied(self, entropy: float) -> float:
        """The coefficient to use at this entropy: above the target the bonus is off."""
        return self.coefficient if entropy <= self.target else 0.0
