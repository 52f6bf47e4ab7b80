"""Algorithms as records of independent choices. Torch-free.

An algorithm says which advantage, surrogate, KL estimate and reduction it is made of; its defaults
are the published setting, each with its source. `rft_algos.objectives` reads a record and calls
the equations; nothing else branches on a choice. A new algorithm is a record here, with the new
equation in its own module and its name in the table of `objectives`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rft_algos.errors import OptionsError

Advantage = Literal["group_norm"]
Surrogate = Literal["ppo_clip"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward", "none"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAlgorithm:
    """What every policy-gradient algorithm chooses. Use a subclass, whose defaults are published ones."""

    name: ClassVar[str] = ""
    advantage: Advantage = "group_norm"
    """How rewards become advantages (`rft_algos.advantages`)."""
    epsilon: float = 1e-6
    """Added to the group's standard deviation, in the unit of the rewards."""
    surrogate: Surrogate = "ppo_clip"
    """What is minimised token by token (`rft_algos.surrogates`)."""
    clip_low: float = 0.2
    """How far below 1 the ratio may go, in (0, 1)."""
    clip_high: float = 0.2
    """How far above 1 the ratio may go, positive."""
    kl_estimator: KlEstimator = "k3"
    """Estimate of the divergence from the reference policy (`rft_algos.kl`)."""
    kl_place: KlPlace = "none"
    """"loss" adds it to the loss, "reward" subtracts its sum over the sequence from the reward."""
    kl_coef: float = 0.0
    """Beta: its weight, per nat."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy that is subtracted from the loss."""
    aggregation: Aggregation = "token_mean"
    """What the mean over tokens is (`rft_algos.reductions`)."""
    max_tokens: int | None = None
    """The constant length that `fixed_length` divides by, in tokens; unset for the others."""

    def __post_init__(self) -> None:
        _check_choice("advantage", self.advantage, get_args(Advantage))
        _check_choice("surrogate", self.surrogate, get_args(Surrogate))
        _check_choice("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        _check_choice("kl_place", self.kl_place, get_args(KlPlace))
        _check_choice("aggregation", self.aggregation, get_args(Aggregation))
        _check_range("epsilon", self.epsilon, self.epsilon > 0, "positive", "epsilon=1e-6")
        _check_range("clip_low", self.clip_low, 0 < self.clip_low < 1, "between 0 and 1", "clip_low=0.2")
        _check_range("clip_high", self.clip_high, self.clip_high > 0, "positive", "clip_high=0.2")
        _check_range("kl_coef", self.kl_coef, self.kl_coef >= 0, "0 or more", "kl_coef=0.0")
        _check_range("entropy_coef", self.entropy_coef, self.entropy_coef >= 0, "0 or more", "entropy_coef=0.0")
        self._check_max_tokens()

    def _check_max_tokens(self) -> None:
        if self.aggregation == "fixed_length":
            given = self.max_tokens is not None and self.max_tokens > 0
            rule = "a positive number of tokens for fixed_length, which divides by it"
            _check_range("max_tokens", self.max_tokens, given, rule, "max_tokens=<the largest response length>")
        else:
            rule = f"unset for {self.aggregation}: only fixed_length divides by it"
            _check_range("max_tokens", self.max_tokens, self.max_tokens is None, rule, 'aggregation="fixed_length"')

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy change the result."""
        return self.kl_place != "none" and self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy of each token changes the result."""
        return self.entropy_coef > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(PolicyAlgorithm):
    """Group relative policy optimisation.

    Defaults of Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300): k3 in the loss with beta 0.04,
    mean over sequences of the mean over tokens. The paper names no clip range and no epsilon;
    0.2 is that of PPO (arXiv 1707.06347), 1e-6 is ours.
    """

    name: ClassVar[str] = "grpo"
    kl_place: KlPlace = "loss"
    kl_coef: float = 0.04
    aggregation: Aggregation = "sequence_mean_token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Supervised fine-tuning: mean negative log-likelihood over all target tokens of the step."""

    name: ClassVar[str] = "sft"
    aggregation: Aggregation = "token_mean"
    max_tokens: int | None = None
    """The constant length that `fixed_length` divides by, in tokens; unset for the others."""

    def __post_init__(self) -> None:
        _check_choice("aggregation", self.aggregation, get_args(Aggregation))
        needs = self.aggregation == "fixed_length"
        rule = "a positive number of tokens for fixed_length, and unset for every other aggregation"
        remedy = "max_tokens=<the largest sequence length>" if needs else "max_tokens=None"
        valid = (self.max_tokens is not None and self.max_tokens > 0) if needs else self.max_tokens is None
        _check_range("max_tokens", self.max_tokens, valid, rule, remedy)


_BY_NAME: dict[str, type[PolicyAlgorithm]] = {"grpo": Grpo, "group_norm": Grpo}


def by_name(name: str) -> PolicyAlgorithm:
    """The published setting of an algorithm; change fields with `dataclasses.replace`.

    Args:
        name: "grpo", or "group_norm", the name of its advantage estimator (no tensors).

    Returns:
        A new record.

    Raises:
        OptionsError: for a name that is not there, with the nearest one.
    """
    _check_choice("algorithm", name, tuple(_BY_NAME))
    return _BY_NAME[name]()


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    nearest = (difflib.get_close_matches(value, allowed, n=1, cutoff=0.0) or [allowed[0]])[0]
    raise OptionsError(
        code="algorithm.unknown_choice",
        what=f"{field} = {value!r}",
        where=f"{field} of the algorithm",
        why=f"it must be one of {', '.join(allowed)}",
        do=f'{field}="{nearest}"',
    )


def _check_range(field: str, value: float | None, valid: bool, rule: str, remedy: str) -> None:
    if valid:
        return
    raise OptionsError(
        code="algorithm.out_of_range",
        what=f"{field} = {value}",
        where=f"{field} of the algorithm",
        why=f"it must be {rule}",
        do=remedy,
    )
