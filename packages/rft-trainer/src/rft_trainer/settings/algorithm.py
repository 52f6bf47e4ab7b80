"""The algorithm: surrogate, divergence from the reference, off-policy correction, reduction. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PolicyLoss = Literal[
    "ppo",
    "dual_clip",
    "gspo",
    "gspo_token",
    "gmpo",
    "cispo",
    "sapo",
    "cpgd",
    "reinforce",
    "importance_weighted",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "kimi",
]


OffPolicyCorrection = Literal["off", "tis", "seq-tis", "mis", "icepop", "seq-mis", "geo-mis"]


LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """The surrogate loss of a token. A setting that is left out is that of the published algorithm."""

    policy_loss: PolicyLoss | None = None
    """The surrogate."""

    use_gspo: bool = False
    """The same as `policy_loss` gspo."""

    use_gmpo: bool = False
    """The same as `policy_loss` gmpo."""

    use_cpg_loss: bool = False
    """The same as `policy_loss` cpgd."""

    eps_clip: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})
    """How far below 1 the probability ratio may go (in log space for gmpo, in probability for dppo)."""

    eps_clip_high: float | None = field(default=None, metadata={"above": 0.0})
    """How far above 1 it may go; left out beside a given eps_clip: as that."""

    dual_clip: float | None = field(default=None, metadata={"above": 1.0})
    """Second bound of the loss where the advantage is negative (with `policy_loss` dual_clip)."""

    loss_agg_mode: LossAggregation | None = None
    """How per-token losses are averaged over tokens and sequences; -norm divides by generate_max_len."""

    high_entropy_token_ratio: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Share of tokens, those of highest entropy over the batch, that the surrogate learns from; 0 = all."""

    entropy_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of the entropy bonus in the loss; 0 = none."""

    entropy_target: float | None = field(default=None, metadata={"minimum": 0.0})
    """Entropy in nats a token towards which the weight of the bonus is moved (with `entropy_coef`)."""


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """Distance from the reference policy, and between the engine's policy and the trainer's."""

    kl_estimator: KlEstimator | None = None
    """Estimator of the divergence from the reference policy."""

    init_kl_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of that divergence (of the drift, for an algorithm that has one); 0 = no reference policy is loaded."""

    use_kl_loss: bool | None = None
    """Put the divergence into the loss; no = into the reward."""

    kl_target: float | None = field(default=None, metadata={"above": 0.0})
    """Divergence in nats a token towards which its weight is moved; none = the weight is constant."""

    kl_horizon: int = field(default=10_000, metadata={"minimum": 1})
    """Samples over which that weight can double or so (with `kl_target`)."""

    max_logprob_gap: float = field(default=0.1, metadata={"minimum": 0.0})
    """Mean distance of the engine's log-probs from the trainer's, in nats a token, that stops the run; 0 = no limit."""

    off_policy_correction: OffPolicyCorrection | None = None
    """Weights for the distance between the engine's log-probs and the trainer's at the start of a step."""

    off_policy_cap: float = field(default=2.0, metadata={"minimum": 1.0})
    """Largest weight (with tis and seq-tis)."""

    off_policy_low: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Ratios below it get weight 0 (with mis, seq-mis and geo-mis)."""

    off_policy_high: float | None = field(default=None, metadata={"minimum": 1.0})
    """Ratios above it get weight 0 (with mis, seq-mis and geo-mis)."""

    off_policy_delta: float | None = field(default=None, metadata={"minimum": 0.0})
    """Sequences of negative advantage whose log-prob fell by more nats a token are left out; none = none are."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(DivergenceSettings, SurrogateSettings):
    """The algorithm, from rewards to updates. A setting that is left out is that of the published algorithm."""

    advantage_estimator: str = "group_norm"
    """The published algorithm, whole (rft-train check prints it), or one of your own as file.py:Class."""

    gamma: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Discount of later rewards, a token (gae, reinforce, reinforce++)."""

    lambd: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Lambda of generalised advantage estimation (gae)."""

    pass_k: int | None = field(default=None, metadata={"minimum": 1})
    """Draws of which one must be right (pass_at_k)."""

    advantages_norm: bool | None = None
    """Shift and scale advantages to mean 0 and deviation 1 over all tokens of the step."""

    advantage_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Largest absolute advantage; 0 = no bound."""

    reward_running_norm: bool = False
    """Divide scores by their running deviation over the run."""

    reward_running_norm_minus_mean: bool = False
    """Subtract their running mean too; turns `reward_running_norm` on."""

    reward_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Largest absolute score, after the group's comparison and the running scale; 0 = no bound."""

    overlong_buffer: bool | None = None
    """Penalise responses that come near the longest that is allowed."""

    overlong_buffer_len: int | None = field(default=None, metadata={"minimum": 1})
    """Tokens before that length in which the penalty grows; none = a fifth of it."""

    overlong_buffer_penalty_factor: float = field(default=1.0, metadata={"above": 0.0})
    """Penalty at that length, in units of reward."""

    length_penalty: bool = False
    """Within a group, prefer short right responses and penalise long ones."""

    mask_truncated_completions: bool = False
    """Learn nothing from responses that were cut off."""

    dynamic_sampling: bool | None = None
    """Replace groups whose responses all have the same reward by sampling more prompts."""

    dynamic_sampling_rounds: int = field(default=10, metadata={"minimum": 1})
    """How often a step may sample more prompts (with `dynamic_sampling`)."""

    filter_groups: bool = False
    """Leave groups whose responses all have the same reward out of the denominators too."""
