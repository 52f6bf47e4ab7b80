"""Relatives of DPO: other losses of the same log-ratios of pairs.

c is the chosen and r the rejected response; x_c = log pi(c) - log ref(c), x_r = log pi(r) - log ref(r) in nats, summed
over the response's tokens; the reference has no gradient. `Pairs` holds the four log-probs. Results are one loss a
pair [B], unreduced. The losses of `aot_paired` and `aot_unpaired` compare pairs with one another, so they depend on
which pairs stand in a batch; those of all others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rft_algos.input_checks import check_not_negative, check_positive, check_unit, refuse
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.tensor_checks import check_mask, check_responses

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon", "alpha"]
"""Words of `f_dpo`."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log-probs of pairs of responses, each summed over its tokens, in nats; gradients flow through the policy's."""

    policy_chosen_B: Tensor
    """[B] log pi(c)."""
    policy_rejected_B: Tensor
    """[B] log pi(r)."""
    reference_chosen_B: Tensor
    """[B] log ref(c)."""
    reference_rejected_B: Tensor
    """[B] log ref(r)."""

    def __post_init__(self) -> None:
        check_responses(
            policy_chosen_B=self.policy_chosen_B,
            policy_rejected_B=self.policy_rejected_B,
            reference_chosen_B=self.reference_chosen_B,
            reference_rejected_B=self.reference_rejected_B,
        )

    @property
    def chosen_B(self) -> Tensor:
        """Return the log-ratios x_c of the chosen responses, [B]."""
        return self.policy_chosen_B - self.reference_chosen_B.detach()

    @property
    def rejected_B(self) -> Tensor:
        """Return the log-ratios x_r of the rejected responses, [B]."""
        return self.policy_rejected_B - self.reference_rejected_B.detach()

    @property
    def margins_B(self) -> Tensor:
        """Return the differences x_c - x_r, [B]."""
        return self.chosen_B - self.rejected_B


def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """l = max(0, 1 - beta (x_c - x_r)): no gradient beyond the margin. [B].

    Source: Zhao et al. 2023, "SLiC-HF" (arXiv 2305.10425), with the log-ratios of Liu et al. 2023, "RSO" (arXiv
    2309.06657). beta is the inverse of the margin in nats, positive.
    """
    check_positive(beta=beta)
    return relu(1 - beta * pairs.margins_B)


def robust_dpo(pairs: Pairs, *, beta: float = 0.1, label_noise: float = 0.1) -> Tensor:
    """DPO without the bias that wrong labels give. [B].

    l = (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e), d = x_c - x_r.

    Its expectation over labels that are flipped with probability e is the loss of `dpo` with right labels. Unlike the
    smoothing of `dpo` it may be negative.

    Source: Chowdhury et al. 2024, "Provably robust DPO" (arXiv 2403.00409). beta is positive, e in [0, 0.5).
    """
    check_positive(beta=beta)
    if not 0 <= label_noise < 0.5:
        refuse(f"label_noise must be in [0, 0.5), it is {label_noise}")
    scaled_B = beta * pairs.margins_B
    loss_B = -(1 - label_noise) * logsigmoid(scaled_B) + label_noise * logsigmoid(-scaled_B)
    return loss_B / (1 - 2 * label_noise)


def exo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """Efficient exact optimisation: the reverse KL of the pair's two-way choice from the smoothed label. [B].

    l = s (log s - log(1 - e)) + (1 - s) (log(1 - s) - log e), s = sigmoid(beta (x_c - x_r)).

    Source: Ji et al. 2024, "Towards efficient exact optimization of language model alignment" (arXiv 2402.00856). beta
    is positive; e in (0, 0.5), since a label of 0 is infinitely far.
    """
    check_positive(beta=beta)
    if not 0 < label_smoothing < 0.5:
        refuse(f"label_smoothing must be in (0, 0.5), it is {label_smoothing}")
    scaled_B = beta * pairs.margins_B
    # logs of both in the type of the loss
    log_right, log_wrong = scaled_B.new_tensor([1 - label_smoothing, label_smoothing]).log()
    return scaled_B.sigmoid() * (logsigmoid(scaled_B) - log_right) + (-scaled_B).sigmoid() * (
        logsigmoid(-scaled_B) - log_wrong
    )


def nca(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Noise contrastive alignment: absolute rewards, so that the chosen response does not lose likelihood. [B].

    l = -log sigmoid(beta x_c) - (log sigmoid(-beta x_c) + log sigmoid(-beta x_r)) / 2.

    Source: Chen et al. 2024, "Noise contrastive alignment of language models with explicit rewards" (arXiv 2402.05369).
    beta is positive.
    """
    check_positive(beta=beta)
    chosen_B, rejected_B = beta * pairs.chosen_B, beta * pairs.rejected_B
    return -logsigmoid(chosen_B) - (logsigmoid(-chosen_B) + logsigmoid(-rejected_B)) / 2


def bco(pairs: Pairs, shift: float | Tensor, *, beta: float = 0.1) -> Tensor:
    """Binary classifier optimisation: chosen responses above, rejected ones below a shift. [B].

    l = -log sigmoid(beta x_c - shift) - log sigmoid(shift - beta x_r).

    Source: Jung et al. 2024, "Binary classifier optimization for LLM alignment" (arXiv 2404.04656). shift is the
    running mean of all rewards beta x, a number or [], without gradient; beta is positive.
    """
    check_positive(beta=beta)
    point = shift.detach() if isinstance(shift, Tensor) else shift
    return -logsigmoid(beta * pairs.chosen_B - point) - logsigmoid(point - beta * pairs.rejected_B)


def sppo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Self-play preference optimisation with hard labels: x_c to 1 / (2 beta), x_r to -1 / (2 beta). [B].

    l = (x_c - 1 / (2 beta))^2 + (x_r + 1 / (2 beta))^2.

    Source: Wu et al. 2024, "Self-play preference optimization" (arXiv 2405.00675), eta = 1 / beta. beta is positive.
    """
    check_positive(beta=beta)
    return (pairs.chosen_B - 1 / (2 * beta)).square() + (pairs.rejected_B + 1 / (2 * beta)).square()


def aot_paired(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Alignment by optimal transport: the policy's margins dominate the reference's at every quantile. [B].

    l_k = -(1 - e) log sigmoid(beta d_k) - e log sigmoid(-beta d_k), d_k = m_(k) - n_(k),
    m = log pi(c) - log pi(r), n = log ref(c) - log ref(r), both sorted.

    Source: Melnyk et al. 2024, "Distributional preference alignment of LLMs via optimal transport" (arXiv 2406.05882),
    paired. Losses stand in the order of the quantiles, not of the pairs. beta is positive; e, how likely a pair is the
    wrong way round, in [0, 0.5).
    """
    policy_B = (pairs.policy_chosen_B - pairs.policy_rejected_B).sort().values
    reference_B = (pairs.reference_chosen_B - pairs.reference_rejected_B).detach().sort().values
    return _smoothed(policy_B - reference_B, beta, label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Alignment by optimal transport: chosen responses dominate rejected ones at every quantile of rewards. [B].

    l_k as in `aot_paired`, d_k = x_c(k) - x_r(k), both sorted, so that responses need not be paired.

    Source: Melnyk et al. 2024 (arXiv 2406.05882), unpaired. Losses stand in the order of quantiles. beta and e as in
    `aot_paired`.
    """
    return _smoothed(pairs.chosen_B.sort().values - pairs.rejected_B.sort().values, beta, label_smoothing)


def _smoothed(apart_B: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Logistic loss of differences, labels being wrong with probability `label_smoothing`, [B]."""
    check_positive(beta=beta)
    if not 0 <= label_smoothing < 0.5:
        refuse(f"label_smoothing must be in [0, 0.5), it is {label_smoothing}")
    scaled_B = beta * apart_B
    return -(1 - label_smoothing) * logsigmoid(scaled_B) - label_smoothing * logsigmoid(-scaled_B)


def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Anchored preference optimisation for a policy that is worse than the chosen responses: x_c up, x_r down. [B].

    l = 1 - sigmoid(beta x_c) + sigmoid(beta x_r).

    Source: D'Oosterlinck et al. 2024, "Anchored preference optimization" (arXiv 2408.06266). beta is positive.
    """
    check_positive(beta=beta)
    return (-beta * pairs.chosen_B).sigmoid() + (beta * pairs.rejected_B).sigmoid()


def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Anchored preference optimisation for a policy better than the chosen responses: both down, r further. [B].

    l = sigmoid(beta x_c) + 1 - sigmoid(beta (x_c - x_r)).

    Source: D'Oosterlinck et al. 2024, "Anchored preference optimization" (arXiv 2408.06266). beta is positive.
    """
    check_positive(beta=beta)
    return (beta * pairs.chosen_B).sigmoid() + (-beta * pairs.margins_B).sigmoid()


def discopop(pairs: Pairs, *, beta: float = 0.05, temperature: float = 0.05) -> Tensor:
    """Log-ratio modulated loss: a blend of the logistic and the exponential loss. [B].

    l = -(1 - m) log sigmoid(z) + m exp(-z), z = beta (x_c - x_r), m = sigmoid(z / temperature).

    Not convex: it has a local optimum at z of about -2 temperature.

    Source: Lu et al. 2024, "Discovering preference optimization algorithms with and for large language models" (arXiv
    2406.08414), with its numbers. beta and temperature are positive.
    """
    check_positive(beta=beta, temperature=temperature)
    scaled_B = beta * pairs.margins_B
    share_B = (scaled_B / temperature).sigmoid()
    # m exp(-z) as one exponential: exp(-z) alone overflows where m is 0
    return -(1 - share_B) * logsigmoid(scaled_B) + (logsigmoid(scaled_B / temperature) - scaled_B).exp()


def f_dpo(pairs: Pairs, *, beta: float = 0.1, divergence: Divergence = "reverse_kl", alpha: float = 0.5) -> Tensor:
    """DPO under another divergence than the reverse KL. [B].

    l = -log sigmoid(beta (f'(u_c) - f'(u_r))), u = pi / ref, and up to constants
    f'(u) = log u (reverse KL, which is `dpo`), -1 / u (forward KL), log(2 u / (1 + u)) (Jensen-Shannon),
    (1 - u^-alpha) / alpha (alpha divergence; towards the reverse KL as alpha goes to 0).

    Source: Wang et al. 2023, "Beyond reverse KL" (f-DPO, arXiv 2309.16240), table 1. log u is held to +-20 before an
    exponential, beyond which there is no gradient. beta is positive, alpha in (0, 1).
    """
    check_positive(beta=beta)
    if divergence not in get_args(Divergence):
        refuse(f"divergence must be one of {', '.join(get_args(Divergence))}, it is {divergence!r}")
    if not 0 < alpha < 1:
        refuse(f"alpha must be in (0, 1), it is {alpha}")

    def slope(log_u_B: Tensor) -> Tensor:
        if divergence == "forward_kl":
            return -ratio(-log_u_B)
        if divergence == "jensen_shannon":
            return logsigmoid(log_u_B)
        if divergence == "alpha":
            return (1 - ratio(-alpha * log_u_B)) / alpha
        return log_u_B

    return -logsigmoid(beta * (slope(pairs.chosen_B) - slope(pairs.rejected_B)))


def cpo(chosen_B: Tensor, rejected_B: Tensor, *, beta: float = 0.1, coefficient: float = 1.0) -> Tensor:
    """Contrastive preference optimisation, without a reference policy. [B].

    l = -log sigmoid(beta (log pi(c) - log pi(r))) - coefficient * log pi(c).

    Source: Xu et al. 2024, "Contrastive preference optimization" (arXiv 2401.08417).

    Args:
        chosen_B: [B] log pi(c).
        rejected_B: [B] log pi(r).
        beta: strength of the preference, positive.
        coefficient: weight of the likelihood of the chosen response, 1 in the paper.

    Returns:
        [B] loss per pair.
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    check_positive(beta=beta)
    check_not_negative(coefficient=coefficient)
    return -logsigmoid(beta * (chosen_B - rejected_B)) - coefficient * chosen_B


def wpo_weights(mean_chosen_B: Tensor, mean_rejected_B: Tensor) -> Tensor:
    """Weights of weighted preference optimisation: how likely the policy itself would have written the pair. [B].

    w = min(1, exp(a_c + a_r)), a the mean over the response's tokens of log pi(y_t), or of log pi(y_t) - log sum_v
    pi(v)^2, the paper's alignment, under which a sampled token weighs 1 on average.

    Source: Zhou et al. 2024, "WPO" (arXiv 2406.11827). A weight multiplies the loss of its pair.

    Args:
        mean_chosen_B: [B] a_c, in nats per token.
        mean_rejected_B: [B] a_r.

    Returns:
        [B] weights in [0, 1], no gradient.
    """
    return (mean_chosen_B + mean_rejected_B).detach().clamp(max=0).exp()


def length_desensitised(logprobs_BL: Tensor, mask_BL: Tensor, partner_lengths_B: Tensor, *, alpha: float) -> Tensor:
    """Log-probs of responses with a smaller weight on what is longer than the other response of the pair. [B].

    log p = sum over the first m loss tokens of log pi_t + alpha * the sum over the others, m the length of the shorter.

    Used in place of log pi(y) in `dpo`, for policy and reference alike. alpha 1 is `dpo`, 0 ignores the excess.

    Source: Liu et al. 2024, "Length desensitization in direct preference optimization" (LD-DPO, arXiv 2409.06411).

    Args:
        logprobs_BL: [B, L] log-probs of tokens; ignored, NaN included, where masked.
        mask_BL: [B, L] bool, true at the tokens of the response.
        partner_lengths_B: [B] number of tokens of the other response of the pair.
        alpha: weight of the excess, in [0, 1].

    Returns:
        [B] log-probs, in nats.
    """
    check_mask(mask_BL=mask_BL)
    check_unit(alpha=alpha)
    is_excess_BL = mask_BL.cumsum(1) > partner_lengths_B[:, None]
    kept_BL = torch.where(mask_BL, logprobs_BL, 0.0)
    return torch.where(is_excess_BL, alpha * kept_BL, kept_BL).sum(1)


def reward_centring(chosen_B: Tensor, rejected_B: Tensor, *, coefficient: float = 0.01) -> Tensor:
    """Penalty that keeps the scores of a reward model around 0: l = coefficient * (s_c + s_r)^2. [B].

    Bradley-Terry losses fix differences alone; this is added to them.

    Source: Eisenstein et al. 2023, "Helping or herding?" (arXiv 2312.09244), whose weight is 0.01.

    Args:
        chosen_B: [B] scores of the chosen responses.
        rejected_B: [B] scores of the rejected ones.
        coefficient: weight, 0 or more.

    Returns:
        [B] penalty per pair.
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    check_not_negative(coefficient=coefficient)
    return coefficient * (chosen_B + rejected_B).square()
