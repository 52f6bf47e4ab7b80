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
    "dro",
    "vespo",
    "topr",
]


OffPolicyCorrection = Literal["off", "tis", "seq-tis", "geo-tis", "mis", "icepop", "seq-mis", "geo-mis", "m2po"]


LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased_k3", "importance_weighted_k1"]


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
    """Lower clip range: how far below 1 the probability ratio may fall (in log space for gmpo, in probability for
    dppo)."""

    eps_clip_high: float | None = field(default=None, metadata={"above": 0.0})
    """Upper clip range: how far above 1 the ratio may rise; none = the same as eps_clip where that is given."""

    dual_clip: float | None = field(default=None, metadata={"above": 1.0})
    """Second bound of the loss where the advantage is negative (with `policy_loss` dual_clip)."""

    loss_agg_mode: LossAggregation | None = None
    """How per-token losses are averaged over tokens and sequences; -norm divides by generate_max_len."""

    high_entropy_token_ratio: float = field(default=0.0, metadata={"minimum": 0.0, "below": 1.0})
    """Fraction of tokens, those of highest entropy in the batch, that the surrogate is computed on; 0 = all."""

    entropy_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of the entropy bonus in the loss; 0 = none."""

    entropy_target: float | None = field(default=None, metadata={"minimum": 0.0})
    """Target of the entropy, in nats a token, towards which the weight of the bonus is adapted (with
    `entropy_coef`)."""


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """Distance from the reference policy, and between the engine's policy and the trainer's."""

    kl_estimator: KlEstimator | None = None
    """Estimator of the divergence from the reference policy; k1+, k3+ (gradient of k2), unbiased_k3 and
    importance_weighted_k1 (tokens weighed by the ratio to the start of the step) with `use_kl_loss` alone."""

    init_kl_coef: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of the divergence from the reference policy (of the drift, for an algorithm that has one); 0 = no
    reference policy is loaded."""

    use_kl_loss: bool | None = None
    """Add the divergence to the loss; no = subtract it from the reward."""

    kl_target: float | None = field(default=None, metadata={"above": 0.0})
    """Target of the divergence, in nats a token, towards which its weight is adapted; none = the weight is constant."""

    kl_horizon: int = field(default=10_000, metadata={"minimum": 1})
    """Horizon of that adaptation, in samples: the weight can about double within it (with `kl_target`)."""

    max_logprob_gap: float = field(default=0.1, metadata={"minimum": 0.0})
    """Stop the run when the mean absolute difference between the engine's and the trainer's log-probs exceeds this, in
    nats a token; 0 = no limit."""

    off_policy_correction: OffPolicyCorrection | None = None
    """Importance weights for the difference between the engine's log-probs and the trainer's at the start of a step."""

    off_policy_cap: float = field(default=2.0, metadata={"minimum": 1.0})
    """Maximum weight (with tis, seq-tis and geo-tis)."""

    off_policy_low: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Lower bound: ratios below it get weight 0 (with mis, seq-mis and geo-mis) or this weight (with tis, seq-tis and
    geo-tis)."""

    off_policy_high: float | None = field(default=None, metadata={"minimum": 1.0})
    """Upper bound: ratios above it get weight 0 (with mis, seq-mis and geo-mis)."""

    off_policy_limit: float | None = field(default=None, metadata={"above": 0.0})
    """Maximum mean square of the log-ratio over the tokens that are kept (with m2po)."""

    off_policy_veto: float | None = field(default=None, metadata={"above": 0.0, "maximum": 1.0})
    """Leave out every response with a token whose ratio is below this, beside the correction; none = leave out none."""

    off_policy_normalize: bool = False
    """Scale the weights of the correction to a mean of 1 over the tokens of the step."""

    off_policy_delta: float | None = field(default=None, metadata={"minimum": 0.0})
    """Leave out sequences of negative advantage whose log-prob fell by more than this, in nats a token; none = leave
    out none."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(DivergenceSettings, SurrogateSettings):
    """The algorithm, from rewards to updates. A setting that is left out is that of the published algorithm."""

    advantage_estimator: str = "group_norm"
    """The published algorithm as a whole (rft-train check prints its parts), or one of your own as file.py:Class."""

    gamma: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Discount factor per token (gae, reinforce, reinforce++)."""

    lambd: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Lambda of generalised advantage estimation (gae)."""

    lambd_value: float | None = field(default=None, metadata={"minimum": 0.0, "maximum": 1.0})
    """Lambda of the returns that the critic learns (gae); none = lambd."""

    length_alpha: float | None = field(default=None, metadata={"above": 0.0})
    """Lambda of the advantages by the length of the response, 1 - 1 / (length_alpha x length) (gae); none = lambd."""

    pass_k: int | None = field(default=None, metadata={"minimum": 1})
    """k of pass@k: number of samples of which one must be correct (pass_at_k)."""

    advantages_norm: bool | None = None
    """Whiten the advantages to mean 0 and standard deviation 1 over all tokens of the step."""

    advantage_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Maximum absolute advantage; 0 = no limit."""

    reward_running_norm: bool = False
    """Divide scores by their running standard deviation over the run."""

    reward_running_norm_minus_mean: bool = False
    """Subtract the running mean as well; implies `reward_running_norm`."""

    reward_clip: float = field(default=0.0, metadata={"minimum": 0.0})
    """Maximum absolute score, after comparison within the group and the running normalization; 0 = no limit."""

    overlong_buffer: bool | None = None
    """Penalize responses that come close to the maximum length."""

    overlong_buffer_len: int | None = field(default=None, metadata={"minimum": 1})
    """Number of tokens before the maximum length over which the penalty grows; none = a fifth of that length."""

    overlong_buffer_penalty_factor: float = field(default=1.0, metadata={"above": 0.0})
    """Penalty at the maximum length, in units of reward."""

    length_penalty: bool = False
    """Within a group, prefer short correct responses and penalize long ones."""

    mask_truncated_completions: bool = False
    """Exclude truncated responses from the loss."""

    dynamic_sampling: bool | None = None
    """Replace groups whose responses all have the same reward by sampling more prompts."""

    dynamic_sampling_rounds: int = field(default=10, metadata={"minimum": 1})
    """Maximum number of extra sampling rounds in one step (with `dynamic_sampling`)."""

    filter_groups: bool = False
    """Exclude groups whose responses all have the same reward from the denominators too."""
