"""Corrections of the distance between the engine's policy and the trainer's, as choices. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rft_algos.algorithms.parameter_checks import Flags, check_positive, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weights of tokens from rho = pi_old / pi_behaviour; a subclass names an equation of `losses.off_policy`."""

    flags: ClassVar[Flags] = {}
    """Words of `--off_policy_correction`; a subclass does not inherit them."""
    is_active: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCorrection(Correction):
    """The engine's log-probs are those of the policy at the start of the step."""

    flags: ClassVar[Flags] = {"off": {}}
    is_active: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capped(Correction):
    cap: float = 2.0
    floor: float = 0.0
    """Smallest weight; 0 for no lower bound, as published."""

    def __post_init__(self) -> None:
        check_range("cap", self.cap, self.cap >= 1, "1 or more", "cap=2.0")
        check_range("floor", self.floor, 0 <= self.floor <= 1, "from 0 to 1", "floor=0.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTis(_Capped):
    """min(rho, cap) at every token; an infinite cap is decoupled PPO's weight (arXiv 2110.00641, 2505.24298)."""

    flags: ClassVar[Flags] = {"tis": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTis(_Capped):
    """min(product of rho over the sequence, cap)."""

    flags: ClassVar[Flags] = {"seq-tis": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricTis(_Capped):
    """min(geometric mean of rho over the sequence, cap): the ratio of GSPO (arXiv 2507.18071) as a weight."""

    flags: ClassVar[Flags] = {"geo-tis": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded(Correction):
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_range("low", self.low, 0 <= self.low <= 1, "from 0 to 1", "low=0.5")
        check_range("high", self.high, self.high >= 1, "1 or more", "high=5.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMis(_Bounded):
    """rho where it is in [low, high], else 0 (IcePop, arXiv 2510.18855); icepop is mis with its published bounds."""

    flags: ClassVar[Flags] = {"mis": {}, "icepop": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMis(_Bounded):
    """The product of rho where it is in [low, high], else 0."""

    flags: ClassVar[Flags] = {"seq-mis": {}}
    low: float = 0.0
    high: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMis(_Bounded):
    """1 where the sequence's geometric mean of rho is in [low, high], else 0."""

    flags: ClassVar[Flags] = {"geo-mis": {}}
    low: float = 0.999
    high: float = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto(_Bounded):
    """1 where rho is in [low, high] at every token of the sequence, else 0."""

    low: float = 1e-4
    high: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment(Correction):
    """1 for the most tokens of the step whose mean square of log rho is within the limit, else 0 (arXiv 2510.01161)."""

    flags: ClassVar[Flags] = {"m2po": {}}
    limit: float = 0.04

    def __post_init__(self) -> None:
        check_positive(limit=self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfNormalised(Correction):
    """The weights of another correction, scaled to a mean of 1 over the loss tokens of the step."""

    part: Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Correction):
    """Several corrections at once: their weights multiply, such as a veto, a mask of sequences and TIS."""

    parts: tuple[Correction, ...]

    def __post_init__(self) -> None:
        check_range("parts", len(self.parts), len(self.parts) > 0, "one or more corrections", "parts=(TokenTis(),)")
