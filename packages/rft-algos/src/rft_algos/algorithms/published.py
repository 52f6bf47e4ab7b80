"""Algorithms as records of independent choices, one per published algorithm. Torch-free.

An algorithm says which advantage, surrogate, correction, KL estimate and reduction it is made of;
its defaults are the published setting, each with its source. `rft_algos.objectives` reads a record
and calls the equations; nothing else branches on a choice.

A new algorithm is a subclass of `PolicyAlgorithm`, with a choice and an equation of its own where it
needs them (`rft_algos.objectives.register_equation`), all in one file; no other file changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from rft_algos.algorithms.components import (
    Advantage,
    BatchStd,
    BestOfGroup,
    Cispo,
    ClipCov,
    Correction,
    CpgdClip,
    CpgdWeighted,
    Dppo,
    Dro,
    Gae,
    Gdpo,
    Gmpo,
    Gpg,
    GroupCentred,
    GroupNorm,
    Gspo,
    GspoToken,
    ImportanceWeighted,
    KlCov,
    LeaveOneOut,
    MaxRl,
    NoCorrection,
    Opo,
    PassAtK,
    PpoClip,
    ProcessGroupNorm,
    Reinforce,
    ReMax,
    Returns,
    Sapo,
    Surrogate,
    TokenTis,
    check_choice,
    check_range,
)

KlEstimator = Literal["k1", "k2", "k3"]
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
    """Estimate of the divergence from the reference policy (`rft_algos.losses.kl`)."""
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
        _check_max_tokens(self.aggregation, self.max_tokens)
        # step rewards are normalised by themselves, and a penalty in the reward of the response would not act
        if self.advantage.needs_steps and self.kl_place == "reward":
            check_choice("kl_place (with rewards of steps)", self.kl_place, ("loss", "none"))

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
        return kl_in_loss or self.needs_entropy or self.drift_coef > 0 or isinstance(self.surrogate, Dro | KlCov)


def _check_max_tokens(aggregation: Aggregation, max_tokens: int | None) -> None:
    if aggregation == "fixed_length":
        is_positive = max_tokens is not None and max_tokens > 0
        rule = "a positive number of tokens for fixed_length, which divides by it"
        check_range("max_tokens", max_tokens, is_positive, rule, "max_tokens=<the largest response length>")
    else:
        rule = f"unset for {aggregation}: only fixed_length divides by it"
        check_range("max_tokens", max_tokens, max_tokens is None, rule, 'aggregation="fixed_length"')


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
class DrGrpo(PolicyAlgorithm):
    """GRPO done right: no division by the deviation, none by the length of the response.

    Defaults of Liu et al. 2025 (arXiv 2503.20783): rewards centred within the group, sum over tokens
    divided by one constant length, no KL. `max_tokens` must be given.
    """

    name: ClassVar[str] = "dr_grpo"
    advantage: Advantage = field(default_factory=GroupCentred)
    aggregation: Aggregation = "fixed_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapo(PolicyAlgorithm):
    """Decoupled clip and dynamic sampling policy optimisation.

    Defaults of Yu et al. 2025 (arXiv 2503.14476): clip 0.2 and 0.28, mean over all tokens, no KL,
    groups without signal replaced, and a length penalty over the last fifth (4,096 of 20,480 tokens).
    """

    name: ClassVar[str] = "dapo"
    surrogate: Surrogate = field(default_factory=lambda: PpoClip(low=0.2, high=0.28))
    dynamic_sampling: bool = True
    overlong_buffer_share: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoAlgorithm(PolicyAlgorithm):
    """Group sequence policy optimisation: the ratio of whole sequences.

    Defaults of Zheng et al. 2025 (arXiv 2507.18071): clip 3e-4 and 4e-4, no KL.
    """

    name: ClassVar[str] = "gspo"
    surrogate: Surrogate = field(default_factory=Gspo)
    aggregation: Aggregation = "sequence_mean_token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoTokenAlgorithm(GspoAlgorithm):
    """GSPO-token (arXiv 2507.18071, section 4.3): the same ratio, advantages of tokens."""

    name: ClassVar[str] = "gspo_token"
    surrogate: Surrogate = field(default_factory=GspoToken)


@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoAlgorithm(PolicyAlgorithm):
    """Geometric-mean policy optimisation (GMPO).

    Defaults of Zhao et al. 2025 (arXiv 2507.20673): log-ratios clipped to +-0.4, no KL.
    """

    name: ClassVar[str] = "gmpo"
    surrogate: Surrogate = field(default_factory=Gmpo)
    aggregation: Aggregation = "sequence_mean_token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoAlgorithm(PolicyAlgorithm):
    """Clipped importance weights as factors of the gradient (MiniMax-M1, arXiv 2506.13585); mean over all tokens."""

    name: ClassVar[str] = "cispo"
    surrogate: Surrogate = field(default_factory=Cispo)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoAlgorithm(PolicyAlgorithm):
    """Soft adaptive policy optimisation (arXiv 2511.20347): temperatures 1.0 and 1.05."""

    name: ClassVar[str] = "sapo"
    surrogate: Surrogate = field(default_factory=Sapo)
    aggregation: Aggregation = "sequence_mean_token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpgd(PolicyAlgorithm):
    """Clipped policy gradient with policy drift (arXiv 2505.12504): log-space clip and a drift term."""

    name: ClassVar[str] = "cpgd"
    advantage: Advantage = field(default_factory=CpgdWeighted)
    surrogate: Surrogate = field(default_factory=CpgdClip)
    drift_coef: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo(PolicyAlgorithm):
    """Proximal policy optimisation with a critic.

    Clip 0.2 and lambda 0.95 of Schulman et al. 2017 (arXiv 1707.06347); gamma 1 and a k1 penalty of
    0.02 in the reward as in Ouyang et al. 2022 (arXiv 2203.02155); advantages normalised over the batch.
    """

    name: ClassVar[str] = "gae"
    advantage: Advantage = field(default_factory=Gae)
    kl_estimator: KlEstimator = "k1"
    kl_place: KlPlace = "reward"
    kl_coef: float = 0.02
    normalise_advantages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceAlgorithm(PolicyAlgorithm):
    """REINFORCE (Williams 1992): the return as advantage, no baseline, no clip."""

    name: ClassVar[str] = "reinforce"
    advantage: Advantage = field(default_factory=Returns)
    surrogate: Surrogate = field(default_factory=Reinforce)
    aggregation: Aggregation = "sequence_mean_token_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus(PolicyAlgorithm):
    """REINFORCE++ (arXiv 2501.03262): returns with a k1 penalty in the reward, normalised over the batch, PPO-clip."""

    name: ClassVar[str] = "reinforce++"
    advantage: Advantage = field(default_factory=Returns)
    kl_estimator: KlEstimator = "k1"
    kl_place: KlPlace = "reward"
    kl_coef: float = 0.01
    normalise_advantages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceBaseline(PolicyAlgorithm):
    """REINFORCE++-baseline (arXiv 2501.03262): group mean as baseline, batch normalisation, k2 in the loss."""

    name: ClassVar[str] = "reinforce_baseline"
    advantage: Advantage = field(default_factory=GroupCentred)
    kl_estimator: KlEstimator = "k2"
    kl_place: KlPlace = "loss"
    kl_coef: float = 0.01
    normalise_advantages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo(PolicyAlgorithm):
    """REINFORCE leave-one-out (arXiv 2402.14740): -A log pi summed over the sequence, k1 in the reward."""

    name: ClassVar[str] = "rloo"
    advantage: Advantage = field(default_factory=LeaveOneOut)
    surrogate: Surrogate = field(default_factory=Reinforce)
    kl_estimator: KlEstimator = "k1"
    kl_place: KlPlace = "reward"
    kl_coef: float = 0.03
    aggregation: Aggregation = "sequence_mean_token_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMaxAlgorithm(PolicyAlgorithm):
    """ReMax (arXiv 2310.10505): the greedy response as baseline."""

    name: ClassVar[str] = "remax"
    advantage: Advantage = field(default_factory=ReMax)
    surrogate: Surrogate = field(default_factory=Reinforce)
    aggregation: Aggregation = "sequence_mean_token_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpoAlgorithm(PolicyAlgorithm):
    """On-policy with an optimal baseline (arXiv 2505.23585): length-weighted baseline, no KL, no entropy bonus."""

    name: ClassVar[str] = "opo"
    advantage: Advantage = field(default_factory=Opo)
    surrogate: Surrogate = field(default_factory=Reinforce)


@dataclass(frozen=True, slots=True, kw_only=True)
class LitePpo(PolicyAlgorithm):
    """Lite PPO (arXiv 2508.08221): group mean, deviation of the batch, mean over all tokens."""

    name: ClassVar[str] = "lite_ppo"
    advantage: Advantage = field(default_factory=BatchStd)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRlAlgorithm(PolicyAlgorithm):
    """MaxRL (arXiv 2602.02710): centred rewards over the group's mean."""

    name: ClassVar[str] = "maxrl"
    advantage: Advantage = field(default_factory=MaxRl)
    surrogate: Surrogate = field(default_factory=ImportanceWeighted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GdpoAlgorithm(PolicyAlgorithm):
    """GDPO (arXiv 2601.05242): every part of the reward normalised by itself, then the batch."""

    name: ClassVar[str] = "gdpo"
    advantage: Advantage = field(default_factory=Gdpo)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtKAlgorithm(Grpo):
    """Pass@k training (arXiv 2508.10751): GRPO with the analytical advantage of k draws."""

    name: ClassVar[str] = "pass_at_k"
    advantage: Advantage = field(default_factory=PassAtK)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfGroupAlgorithm(Grpo):
    """Only the best response of a group is learned (arXiv 2503.19595)."""

    name: ClassVar[str] = "best_of_group"
    advantage: Advantage = field(default_factory=BestOfGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpgAlgorithm(PolicyAlgorithm):
    """Group policy gradient (arXiv 2504.02546): -A log pi, no clip, no KL."""

    name: ClassVar[str] = "gpg"
    advantage: Advantage = field(default_factory=Gpg)
    surrogate: Surrogate = field(default_factory=Reinforce)


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoAlgorithm(PolicyAlgorithm):
    """Divergence PPO (arXiv 2602.04879): a mask by the change of the probability in place of the clip."""

    name: ClassVar[str] = "dppo"
    surrogate: Surrogate = field(default_factory=Dppo)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovAlgorithm(PolicyAlgorithm):
    """Clip-Cov (arXiv 2505.22617): a few tokens of high covariance give no gradient."""

    name: ClassVar[str] = "clip_cov"
    surrogate: Surrogate = field(default_factory=ClipCov)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovAlgorithm(PolicyAlgorithm):
    """KL-Cov (arXiv 2505.22617): the tokens of highest covariance are held where they were."""

    name: ClassVar[str] = "kl_cov"
    surrogate: Surrogate = field(default_factory=KlCov)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiAlgorithm(PolicyAlgorithm):
    """Kimi k1.5's mirror descent (arXiv 2501.12599): centred rewards and a squared log-ratio."""

    name: ClassVar[str] = "kimi"
    advantage: Advantage = field(default_factory=GroupCentred)
    surrogate: Surrogate = field(default_factory=Dro)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo(Grpo):
    """Decoupled PPO (arXiv 2110.00641, 2505.24298): clip around the step's start, weighted by the mismatch."""

    name: ClassVar[str] = "decoupled_ppo"
    correction: Correction = field(default_factory=lambda: TokenTis(cap=5.0))
    kl_place: KlPlace = "none"
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGrpo(Grpo):
    """GRPO with process supervision (arXiv 2402.03300, section 4.1.3): rewards at steps inside the response."""

    name: ClassVar[str] = "process_grpo"
    advantage: Advantage = field(default_factory=ProcessGroupNorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Supervised fine-tuning: mean negative log-likelihood over all target tokens of the step."""

    name: ClassVar[str] = "sft"
    aggregation: Aggregation = "token_mean"
    max_tokens: int | None = None
    """The constant length that `fixed_length` divides by, in tokens; unset for the others."""

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        _check_max_tokens(self.aggregation, self.max_tokens)


PUBLISHED: tuple[type[PolicyAlgorithm], ...] = (
    Grpo,
    DrGrpo,
    Dapo,
    GspoAlgorithm,
    GspoTokenAlgorithm,
    GmpoAlgorithm,
    CispoAlgorithm,
    SapoAlgorithm,
    Cpgd,
    Ppo,
    ReinforceAlgorithm,
    ReinforcePlusPlus,
    ReinforceBaseline,
    Rloo,
    ReMaxAlgorithm,
    OpoAlgorithm,
    LitePpo,
    MaxRlAlgorithm,
    GdpoAlgorithm,
    PassAtKAlgorithm,
    BestOfGroupAlgorithm,
    GpgAlgorithm,
    DppoAlgorithm,
    ClipCovAlgorithm,
    KlCovAlgorithm,
    KimiAlgorithm,
    DecoupledPpo,
    ProcessGrpo,
)
"""Every algorithm that a name selects."""

ALIASES = {"group_norm": "grpo", "ppo": "gae", "reinforce_plus_plus": "reinforce++", "drgrpo": "dr_grpo"}
"""Other names of the same algorithms: `group_norm` and `gae` are those of their advantage estimators."""


def by_name(name: str) -> type[PolicyAlgorithm]:
    """The record type of a published algorithm.

    Args:
        name: its name or an alias, such as "group_norm" (no tensors).

    Returns:
        The type; calling it gives the published setting, with fields to change as keywords.

    Raises:
        OptionsError: for a name that is not there, with the nearest one.
    """
    types = {record.name: record for record in PUBLISHED}
    types |= {alias: types[target] for alias, target in ALIASES.items()}
    check_choice("algorithm", name, tuple(types))
    return types[name]
