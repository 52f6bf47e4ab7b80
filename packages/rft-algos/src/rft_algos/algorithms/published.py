"""Algorithms as records of independent choices, one per published algorithm. Torch-free.

An algorithm says which advantage, surrogate, correction, KL estimate and reduction it is made of;
its defaults are the published setting, each with its source. `rft_algos.objectives` reads a record
and calls the equations; nothing else branches on a choice.

A new algorithm is a subclass of `PolicyAlgorithm`, with a choice and an equation of its own where it
needs them (`rft_algos.objectives.register_equation`), all in one file; no other file changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, get_args

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
    Gspo,
    GspoToken,
    ImportanceWeighted,
    KlCov,
    LeaveOneOut,
    MaxRl,
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
)
from rft_algos.algorithms.policy_algorithm import REWARD_KL_ESTIMATORS as REWARD_KL_ESTIMATORS
from rft_algos.algorithms.policy_algorithm import Aggregation as Aggregation
from rft_algos.algorithms.policy_algorithm import KlEstimator as KlEstimator
from rft_algos.algorithms.policy_algorithm import KlPlace as KlPlace
from rft_algos.algorithms.policy_algorithm import PolicyAlgorithm as PolicyAlgorithm
from rft_algos.algorithms.policy_algorithm import check_max_tokens
from rft_algos.input_checks import check_not_negative, refuse


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
    label_smoothing: float = 0.0
    """Share e of the target that the whole vocabulary has (Szegedy et al. 2015, arXiv 1512.00567, section 7)."""
    z_loss_coef: float = 0.0
    """Weight of (log Z)^2 (PaLM, arXiv 2204.02311, section 5: 1e-4)."""

    def __post_init__(self) -> None:
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_max_tokens(self.aggregation, self.max_tokens)
        check_not_negative(label_smoothing=self.label_smoothing, z_loss_coef=self.z_loss_coef)
        if self.label_smoothing >= 1:
            refuse(f"label_smoothing must be in [0, 1), it is {self.label_smoothing}")


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
