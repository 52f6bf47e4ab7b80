"""Components of an algorithm: advantage, surrogate and off-policy correction. Torch-free.

A choice is a frozen record that names an equation and holds its parameters, with the published
values as defaults. `rft_algos.objectives` maps the type of a choice to its equation; nothing else
looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rft_algos.algorithms.corrections import Correction as Correction
from rft_algos.algorithms.corrections import GeometricMis as GeometricMis
from rft_algos.algorithms.corrections import GeometricTis as GeometricTis
from rft_algos.algorithms.corrections import NoCorrection as NoCorrection
from rft_algos.algorithms.corrections import Product as Product
from rft_algos.algorithms.corrections import SecondMoment as SecondMoment
from rft_algos.algorithms.corrections import SelfNormalised as SelfNormalised
from rft_algos.algorithms.corrections import SequenceMis as SequenceMis
from rft_algos.algorithms.corrections import SequenceTis as SequenceTis
from rft_algos.algorithms.corrections import TokenMis as TokenMis
from rft_algos.algorithms.corrections import TokenTis as TokenTis
from rft_algos.algorithms.corrections import Veto as Veto
from rft_algos.algorithms.parameter_checks import Flags, check_discount, check_positive, check_share
from rft_algos.algorithms.parameter_checks import check_choice as check_choice
from rft_algos.algorithms.parameter_checks import check_range as check_range

# advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """Advantage estimator: rewards to advantages; a subclass names an equation of `rft_algos.advantages`."""

    compares_groups: ClassVar[bool] = True
    """Whether it needs two or more rollouts of a prompt."""
    needs_values: ClassVar[bool] = False
    """Whether it needs a critic."""
    needs_greedy: ClassVar[bool] = False
    """Whether it needs the reward of one greedy response to each prompt."""
    needs_components: ClassVar[bool] = False
    """Whether it needs the parts of the reward apart."""
    needs_steps: ClassVar[bool] = False
    """Whether it needs rewards at steps inside the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNorm(Advantage):
    """(R - mean) / (std + epsilon) within the group (arXiv 2402.03300)."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCentred(Advantage):
    """R - mean within the group (Dr. GRPO, arXiv 2503.20783)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStd(Advantage):
    """(R - group mean) / (std over the batch + epsilon) (arXiv 2508.08221)."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut(Advantage):
    """R less the mean of the others in the group (RLOO, arXiv 2402.14740)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxRl(Advantage):
    """(R - mean) / mean within the group (arXiv 2602.02710)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opo(Advantage):
    """R less the group's mean weighted by length (arXiv 2505.23585)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(Advantage):
    """Advantage of being right at least once in k draws (arXiv 2508.10751)."""

    k: int = 4

    def __post_init__(self) -> None:
        check_range("k", self.k, self.k >= 1, "1 or more", "k=4")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfGroup(Advantage):
    """Only the best of the group: (best - second) / (std + epsilon) (arXiv 2503.19595)."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdpo(Advantage):
    """Every part of the reward normalised within the group, then added (arXiv 2601.05242)."""

    needs_components: ClassVar[bool] = True
    epsilon: float = 1e-6
    over_batch: bool = True
    """Normalise the sum over all sequences of the batch, each counted once: the paper's last step."""

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpg(Advantage):
    """R - mean, rescaled for the groups that give no gradient (arXiv 2504.02546)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpgdWeighted(Advantage):
    """omega(prompt) (R - mean) (arXiv 2505.12504)."""

    weighting: Literal["equal", "std", "clip_filter"] = "clip_filter"
    epsilon: float = 1e-6
    max_weight: float = 3.0

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, ("equal", "std", "clip_filter"))
        check_positive(epsilon=self.epsilon, max_weight=self.max_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMax(Advantage):
    """R less the reward of the greedy response (arXiv 2310.10505)."""

    compares_groups: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns(Advantage):
    """Discounted sum of the rewards from the token on (REINFORCE, Williams 1992)."""

    compares_groups: ClassVar[bool] = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_discount(gamma=self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae(Advantage):
    """Generalised advantage estimation from a critic's values (arXiv 1506.02438)."""

    compares_groups: ClassVar[bool] = False
    needs_values: ClassVar[bool] = True
    gamma: float = 1.0
    lambd: float = 0.95
    turn_gamma: float | None = None
    """Discount from one turn of a conversation to the next; None = gamma, as between any two tokens."""
    lambd_value: float | None = None
    """Lambda of the returns that the critic learns (VC-PPO, arXiv 2503.01491: 1); None = lambd."""
    length_alpha: float | None = None
    """Lambda of the advantages by length, 1 - 1 / (alpha L) (VAPO, arXiv 2504.05118: 0.05); None = lambd."""

    def __post_init__(self) -> None:
        check_discount(gamma=self.gamma, lambd=self.lambd)
        if self.turn_gamma is not None:
            check_discount(turn_gamma=self.turn_gamma)
        if self.lambd_value is not None:
            check_discount(lambd_value=self.lambd_value)
        if self.length_alpha is not None:
            check_positive(length_alpha=self.length_alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupNorm(Advantage):
    """Rewards of steps, normalised within the group, summed from the token on (arXiv 2402.03300, section 4.1.3)."""

    needs_steps: ClassVar[bool] = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)


# surrogates


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Surrogate loss, minimised token by token; a subclass names an equation of `rft_algos.surrogates`."""

    flags: ClassVar[Flags] = {}
    """Words of `--policy_loss`; a subclass does not inherit them."""
    by_sequence: ClassVar[bool] = False
    """Whether its value belongs to a sequence."""
    aggregations: ClassVar[tuple[str, ...]] = ("sequence_mean_token_mean",)
    """Reductions that a record may have with it, the published one first; of use where `by_sequence`."""
    is_selective: ClassVar[bool] = False
    """Whether tokens are selected over the whole batch before the step."""
    moves_without_advantage: ClassVar[bool] = False
    """Whether a token of advantage zero has a gradient."""


_OF_SEQUENCE_SUMS = ("sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length")
"""Each weighs the tokens of a sequence alike: the published sum over its tokens, by its length or by a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Surrogate):
    """A surrogate whose ratio is clipped to [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        check_share(low=self.low)
        check_positive(high=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip(Clipped):
    """The clipped surrogate (arXiv 1707.06347); unequal bounds are clip-higher (arXiv 2503.14476)."""

    flags: ClassVar[Flags] = {"ppo": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClip(Clipped):
    """PPO-clip with a second bound where the advantage is negative (arXiv 1912.09729)."""

    flags: ClassVar[Flags] = {"dual_clip": {}}
    dual: float = 3.0

    def __post_init__(self) -> None:
        Clipped.__post_init__(self)
        check_range("dual", self.dual, self.dual > 1, "above 1", "dual=3.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(Clipped):
    """The ratio of whole sequences, length-normalised (arXiv 2507.18071)."""

    flags: ClassVar[Flags] = {"gspo": {}}
    by_sequence: ClassVar[bool] = True
    low: float = 3e-4
    high: float = 4e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoToken(Clipped):
    """GSPO with advantages of tokens (arXiv 2507.18071, section 4.3)."""

    flags: ClassVar[Flags] = {"gspo_token": {}}
    by_sequence: ClassVar[bool] = True
    low: float = 3e-4
    high: float = 4e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(Clipped):
    """Geometric mean of the tokens' ratios, clipped in log space to [-low, high] (arXiv 2507.20673)."""

    flags: ClassVar[Flags] = {"gmpo": {}}
    by_sequence: ClassVar[bool] = True
    low: float = 0.4
    high: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(Surrogate):
    """The clipped ratio as a weight of the log-prob's gradient (arXiv 2506.13585)."""

    flags: ClassVar[Flags] = {"cispo": {}}
    low: float | None = None
    """How far below 1 the weight may go; None is no bound, as published."""
    high: float = 4.0
    """How far above 1; the weight is at most 1 + high."""

    def __post_init__(self) -> None:
        if self.low is not None:
            check_share(low=self.low)
        check_positive(high=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(Surrogate):
    """A soft gate in place of the clip (arXiv 2511.20347)."""

    flags: ClassVar[Flags] = {"sapo": {}}
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        check_positive(tau_positive=self.tau_positive, tau_negative=self.tau_negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpgdClip(Clipped):
    """Clip of the log-prob instead of the ratio (arXiv 2505.12504)."""

    flags: ClassVar[Flags] = {"cpgd": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(Surrogate):
    """-A log pi: no ratio and no clip (Williams 1992)."""

    flags: ClassVar[Flags] = {"reinforce": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeighted(Surrogate):
    """-A r: the ratio without a clip."""

    flags: ClassVar[Flags] = {"importance_weighted": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(Surrogate):
    """A trust region on the change of a token's probability (arXiv 2602.04879)."""

    flags: ClassVar[Flags] = {"dppo_tv": {}, "dppo_kl": {"divergence": "kl"}}
    divergence: Literal["tv", "kl"] = "tv"
    low: float = 0.2
    """Largest fall: a probability with "tv", nats with "kl". The authors' scripts have 0.15 for tv and 0.05 for kl."""
    high: float = 0.2
    """Largest rise, likewise."""
    max_ratio: float = 20.0
    """Largest importance weight; infinity for none, as in the authors' scripts."""

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, ("tv", "kl"))
        check_positive(low=self.low, high=self.high)
        check_range("max_ratio", self.max_ratio, self.max_ratio >= 1, "1 or more", "max_ratio=20.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(Clipped):
    """PPO-clip, with a few tokens of high covariance left out of the gradient (arXiv 2505.22617)."""

    flags: ClassVar[Flags] = {"clip_cov": {}}
    is_selective: ClassVar[bool] = True
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    fraction: float = 2e-4

    def __post_init__(self) -> None:
        Clipped.__post_init__(self)
        rule = f"above covariance_low = {self.covariance_low}"
        valid = self.covariance_high > self.covariance_low
        check_range("covariance_high", self.covariance_high, valid, rule, "covariance_high=5.0")
        check_share(fraction=self.fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov(Surrogate):
    """A penalty on the change of the tokens of highest covariance (arXiv 2505.22617)."""

    flags: ClassVar[Flags] = {"kl_cov": {}}
    moves_without_advantage: ClassVar[bool] = True
    is_selective: ClassVar[bool] = True
    coefficient: float = 1.0
    fraction: float = 2e-3

    def __post_init__(self) -> None:
        check_positive(coefficient=self.coefficient)
        check_share(fraction=self.fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dro(Surrogate):
    """-A log pi with the squared log-ratio of every token; of whole responses, as published, it is `DroSequence`."""

    flags: ClassVar[Flags] = {"kimi": {}}
    moves_without_advantage: ClassVar[bool] = True
    tau: float = 0.1

    def __post_init__(self) -> None:
        check_positive(tau=self.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroSequence(Dro):
    """-A log pi with the squared log-ratio of whole responses, as published (arXiv 2501.12599, 2405.19107)."""

    flags: ClassVar[Flags] = {"dro": {}}
    by_sequence: ClassVar[bool] = True
    aggregations: ClassVar[tuple[str, ...]] = _OF_SEQUENCE_SUMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(Surrogate):
    """A soft window on the ratio of whole sequences (arXiv 2602.10693)."""

    flags: ClassVar[Flags] = {"vespo": {}}
    by_sequence: ClassVar[bool] = True
    aggregations: ClassVar[tuple[str, ...]] = _OF_SEQUENCE_SUMS
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        check_positive(k_positive=self.k_positive, lambda_positive=self.lambda_positive)
        check_positive(k_negative=self.k_negative, lambda_negative=self.lambda_negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topr(Surrogate):
    """Good responses as in supervised training, bad ones weighed by their ratio up to 1 (arXiv 2503.14286)."""

    flags: ClassVar[Flags] = {"topr": {}}
    by_sequence: ClassVar[bool] = True
    aggregations: ClassVar[tuple[str, ...]] = _OF_SEQUENCE_SUMS
