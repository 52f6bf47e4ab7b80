"""The settings that all policy-gradient algorithms have, as one record. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from rft_algos.algorithms.components import (
    Advantage,
    Correction,
    GroupNorm,
    NoCorrection,
    PpoClip,
    Surrogate,
    check_choice,
    check_range,
)

KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased_k3", "importance_weighted_k1"]
REWARD_KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3", "abs")
"""Those that a penalty in the reward can be: the others differ from k1 and k3 by their gradient alone."""
KlPlace = Literal["loss", "reward", "none"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAlgorithm:
    """Settings common to all policy-gradient algorithms. Use a subclass, whose defaults are published ones."""

    name: ClassVar[str] = ""
    advantage: Advantage = field(default_factory=GroupNorm)
    """How rewards become advantages."""
    surrogate: Surrogate = field(default_factory=PpoClip)
    """What is minimised token by token."""
    correction: Correction = field(default_factory=NoCorrection)
    """Weights for the distance between the engine's policy and the trainer's."""
    off_policy_delta: float | None = None
    """Sequences of negative advantage whose mean log-ratio to the engine fell by more are left out, in nats a
    token (arXiv 2512.02556); None for no such mask."""
    kl_estimator: KlEstimator = "k3"
    """Estimate of the divergence from the reference policy (`rft_algos.losses.kl.estimates`)."""
    kl_place: KlPlace = "none"
    """"loss" adds it to the loss, "reward" subtracts it from the reward."""
    kl_coef: float = 0.0
    """Beta: its weight, per nat."""
    drift_coef: float = 0.0
    """Weight of the divergence from the policy at the start of the step, in the loss (CPGD's drift term)."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy that is subtracted from the loss."""
    high_entropy_fraction: float = 1.0
    """Share of the tokens, those of highest entropy, that the surrogate learns from (arXiv 2506.01939)."""
    normalise_advantages: bool = False
    """Whether advantages are shifted and scaled to mean 0 and deviation 1 over all loss tokens of the batch."""
    advantage_clip: float = 0.0
    """Largest absolute advantage; 0 for no bound."""
    aggregation: Aggregation = "token_mean"
    """What the mean over tokens is (`rft_algos.losses.aggregation`)."""
    max_tokens: int | None = None
    """The constant length that `fixed_length` divides by, in tokens; unset for the others."""
    dynamic_sampling: bool = False
    """Whether groups without signal are replaced by sampling more prompts (DAPO)."""
    overlong_buffer_share: float = 0.0
    """Share of the longest response over which a penalty for length grows (DAPO); 0 for none."""

    def __post_init__(self) -> None:
        check_choice("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        check_choice("kl_place", self.kl_place, get_args(KlPlace))
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        for name in ("kl_coef", "drift_coef", "entropy_coef", "advantage_clip"):
            value = getattr(self, name)
            check_range(name, value, value >= 0, "0 or more", f"{name}=0.0")
        fraction, share = self.high_entropy_fraction, self.overlong_buffer_share
        rule = "above 0 and at most 1"
        check_range("high_entropy_fraction", fraction, 0 < fraction <= 1, rule, "high_entropy_fraction=0.2")
        check_range("overlong_buffer_share", share, 0 <= share < 1, "from 0 to below 1", "overlong_buffer_share=0.2")
        check_max_tokens(self.aggregation, self.max_tokens)
        # step rewards are normalised by themselves, and a penalty in the reward of the response would not act
        if self.advantage.needs_steps and self.kl_place == "reward":
            check_choice("kl_place", self.kl_place, ("loss", "none"), condition="with rewards of steps")
        # there nothing is differentiated, and tokens are those of the old policy itself
        if self.kl_place == "reward":
            check_choice("kl_estimator", self.kl_estimator, REWARD_KL_ESTIMATORS, condition='with kl_place="reward"')

    @property
    def needs_reference(self) -> bool:
        """True where log-probs of a reference policy change the result."""
        return self.kl_place != "none" and self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """True where gradients flow through the entropy of each token."""
        return self.entropy_coef > 0

    @property
    def needs_old_entropy(self) -> bool:
        """True where the entropy at the start of the step selects tokens."""
        return self.high_entropy_fraction < 1

    @property
    def needs_old_logprobs(self) -> bool:
        """True where the trainer's own log-probs at the start of the step differ in use from the engine's."""
        return self.correction.is_active

    @property
    def has_other_terms(self) -> bool:
        """True where tokens of advantage zero have a gradient."""
        kl_in_loss = self.kl_place == "loss" and self.needs_reference
        return kl_in_loss or self.needs_entropy or self.drift_coef > 0 or self.surrogate.moves_without_advantage


def check_max_tokens(aggregation: Aggregation, max_tokens: int | None) -> None:
    """Refuse `fixed_length` without the length that it divides by, and any other reduction with one (no tensors).

    Args:
        aggregation: the reduction.
        max_tokens: the constant length, in tokens, or None.

    Raises:
        InputError: for either.
    """
    if aggregation == "fixed_length":
        is_positive = max_tokens is not None and max_tokens > 0
        rule = "a positive number of tokens for fixed_length, which divides by it"
        check_range("max_tokens", max_tokens, is_positive, rule, "max_tokens=<the largest response length>")
    else:
        rule = f"unset for {aggregation}: only fixed_length divides by it"
        check_range("max_tokens", max_tokens, max_tokens is None, rule, 'aggregation="fixed_length"')
