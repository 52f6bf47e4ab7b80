"""Losses of pairs of responses, one preferred to the other, and of responses labelled good or bad.

Inputs are one number a response: a score s of a reward model, or a log-prob in nats, summed over
the response's tokens, under the policy `pi` that is trained or under the reference policy `ref`. c is
the chosen and r the rejected response. Gradients flow through scores and the policy's log-probs,
never through the reference's. Results are one loss a pair (KTO: a response), unreduced.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rft_algos.input_checks import check_not_negative, check_positive, refuse
from rft_algos.losses.aggregation import Count, on_device_of
from rft_algos.packed.tensor_checks import check_responses


def bradley_terry(chosen_B: Tensor, rejected_B: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """Negative log-likelihood of the Bradley-Terry model: l = -log sigmoid(s_c - s_r - margin).

    Sources: Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the margin from Touvron et al. 2023,
    "Llama 2" (arXiv 2307.09288), section 3.2.2.

    Args:
        chosen_B: [B] scores of the chosen responses.
        rejected_B: [B] scores of the rejected ones.
        margin: how much better the chosen one should score, a number or [B].

    Returns:
        [B] loss per pair, log 2 where the scores differ by the margin.
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    return -logsigmoid(chosen_B - rejected_B - margin)


def hps(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Cross-entropy over the two responses, the chosen one being the target.

    l = -log (e^s_c / (e^s_c + e^s_r)). With a temperature the caller multiplies both scores by the
    exponential of the logit scale. As an equation it is `bradley_terry` with margin 0; arguments and
    result are [B], as there.

    Source: Wu et al. 2023, "Human preference score" (arXiv 2303.14420).
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    return -torch.log_softmax(torch.stack([chosen_B, rejected_B], dim=1), dim=1)[:, 0]


def log_exp(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """l = log(1 + exp(s_r - s_c)), which neither overflows nor rounds to 0 early.

    As an equation it is `bradley_terry` with margin 0; arguments and result are [B], as there.

    Source: Bai et al. 2022 (arXiv 2204.05862).
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    difference_B = rejected_B - chosen_B
    return torch.logaddexp(torch.zeros_like(difference_B), difference_B)


def rao_kupper_tie(chosen_B: Tensor, rejected_B: Tensor, threshold: float) -> Tensor:
    """Negative log-likelihood of a tie in the Rao-Kupper model of paired comparisons.

    P(c wins) = sigmoid(d - eta), P(r wins) = sigmoid(-d - eta), d = s_c - s_r, and what is left is
    P(tie) = (e^(2 eta) - 1) sigmoid(d - eta) sigmoid(-d - eta). The loss of a pair that was decided is
    `bradley_terry` with margin eta; both together are the likelihood of one model.

    Source: Rao and Kupper 1967, "Ties in paired-comparison experiments: a generalization of the Bradley-Terry model",
    with theta = e^eta.

    Args:
        chosen_B: [B] scores of one response of each pair.
        rejected_B: [B] scores of the other; exchanged, they give the same loss.
        threshold: eta, below which a difference of scores is hardly noticed; positive.

    Returns:
        [B] loss per pair, smallest where the scores are equal.
    """
    check_responses(chosen_B=chosen_B, rejected_B=rejected_B)
    check_positive(threshold=threshold)
    difference_B = chosen_B - rejected_B
    both_B = logsigmoid(difference_B - threshold) + logsigmoid(-difference_B - threshold)
    # log(e^(2 eta) - 1) without overflow for a large eta
    return -both_B - 2 * threshold - math.log(-math.expm1(-2 * threshold))


def implicit_reward(policy_B: Tensor, reference_B: Tensor, beta: float) -> Tensor:
    """Reward whose optimal policy is `pi`: beta (log pi(y) - log ref(y)), up to a constant of the prompt.

    Source: Rafailov et al. 2023, "Direct preference optimization" (arXiv 2305.18290), equation 5.

    Args:
        policy_B: [B] log pi(y).
        reference_B: [B] log ref(y).
        beta: strength of the pull to the reference, in units of reward per nat.

    Returns:
        [B] rewards.
    """
    return beta * (policy_B - reference_B.detach())


def mean_logprobs(logprobs_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Log-prob per token: log pi(y) / |y|.

    Args:
        logprobs_B: [B] log pi(y).
        lengths_B: [B] |y|, in tokens; a response of none counts as one.

    Returns:
        [B] mean log-probs, in nats per token.
    """
    return logprobs_B / lengths_B.clamp(min=1)


def log_odds(mean_logprobs_B: Tensor) -> Tensor:
    """log (p / (1 - p)) with p the geometric mean of the tokens' probabilities.

    A p of 1 would have infinite odds: log p is first bounded to -eps of its type (odds of 8e6 in
    float32), beyond which there is no gradient.

    Source: Hong et al. 2024, "ORPO" (arXiv 2403.07691), section 4.1.

    Args:
        mean_logprobs_B: [B] log p from `mean_logprobs`, in nats, at most 0.

    Returns:
        [B] log odds, finite where log p is.
    """
    log_p_B = mean_logprobs_B.clamp(max=-torch.finfo(mean_logprobs_B.dtype).eps)
    # expm1 keeps the digits of 1 - p near p = 1; where p is tiny those that it loses are far below log p
    return log_p_B - torch.log(-torch.expm1(log_p_B))


def dpo(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float | Tensor = 0.0,
) -> Tensor:
    """Compute the loss of direct preference optimisation (DPO).

    l = -(1 - e) log sigmoid(beta d - m) - e log sigmoid(-(beta d - m)), e the label smoothing, m the margin and
    d = log pi(c) - log ref(c) - (log pi(r) - log ref(r)).

    Sources: Rafailov et al. 2023 (arXiv 2305.18290), equation 7; smoothing for labels that are wrong
    with probability e from Mitchell 2023, "A note on DPO with noisy preferences" (conservative DPO); the margin from
    Amini et al. 2024, "Direct preference optimization with an offset" (arXiv 2402.10571), equation 8.

    Args:
        policy_chosen_B: [B] log pi(c).
        policy_rejected_B: [B] log pi(r).
        reference_chosen_B: [B] log ref(c).
        reference_rejected_B: [B] log ref(r).
        beta: strength of the pull to the reference, positive.
        label_smoothing: e, how likely a pair is the wrong way round, in [0, 0.5).
        margin: m, how much better the chosen response should be, in units of reward: a number or [B].

    Returns:
        [B] loss per pair, log 2 where the policy is the reference and the margin 0.
    """
    check_responses(
        policy_chosen_B=policy_chosen_B,
        policy_rejected_B=policy_rejected_B,
        reference_chosen_B=reference_chosen_B,
        reference_rejected_B=reference_rejected_B,
    )
    check_positive(beta=beta)
    if not 0 <= label_smoothing < 0.5:
        refuse(f"label_smoothing must be in [0, 0.5), it is {label_smoothing}")
    chosen_B = implicit_reward(policy_chosen_B, reference_chosen_B, beta)
    margins_B = chosen_B - implicit_reward(policy_rejected_B, reference_rejected_B, beta) - margin
    return -(1 - label_smoothing) * logsigmoid(margins_B) - label_smoothing * logsigmoid(-margins_B)


def ipo(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Identity preference optimisation: l = (d - 1 / (2 beta))^2, with d as in `dpo`.

    d is of whole responses, as published; OpenRLHF and LightRFT do this. TRL and AReaL divide by
    lengths first, which is `ipo_per_token`: the same beta then asks for another margin.

    Arguments and result are [B], as in `dpo`; beta is positive, the margin aimed at 1 / (2 beta) nats.

    Source: Azar et al. 2023 (arXiv 2310.12036), equation 17, where beta is called tau.
    """
    check_responses(
        policy_chosen_B=policy_chosen_B,
        policy_rejected_B=policy_rejected_B,
        reference_chosen_B=reference_chosen_B,
        reference_rejected_B=reference_rejected_B,
    )
    if not beta > 0:
        refuse(f"beta must be positive, it is {beta}")
    chosen_B = policy_chosen_B - reference_chosen_B.detach()
    rejected_B = policy_rejected_B - reference_rejected_B.detach()
    return (chosen_B - rejected_B - 1 / (2 * beta)).square()


def ipo_per_token(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    chosen_lengths_B: Tensor,
    rejected_lengths_B: Tensor,
    *,
    beta: float,
) -> Tensor:
    """`ipo` of log-probs per token, so that long responses do not reach the margin by their length alone.

    l = (d - 1 / (2 beta))^2, d = (log pi(c) - log ref(c)) / |c| - (log pi(r) - log ref(r)) / |r|.
    Arguments and result are [B], as in `dpo`, lengths in tokens; the margin is 1 / (2 beta) nats a token.
    """
    return ipo(
        mean_logprobs(policy_chosen_B, chosen_lengths_B),
        mean_logprobs(policy_rejected_B, rejected_lengths_B),
        mean_logprobs(reference_chosen_B, chosen_lengths_B),
        mean_logprobs(reference_rejected_B, rejected_lengths_B),
        beta=beta,
    )


def orpo(
    chosen_B: Tensor, rejected_B: Tensor, chosen_lengths_B: Tensor, rejected_lengths_B: Tensor, *, coefficient: float
) -> Tensor:
    """Odds ratio preference optimisation, without a reference policy.

    l = -log pi(c) / |c| - coefficient * log sigmoid(log odds(c) - log odds(r)), odds as in `log_odds`.

    Source: Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7, the likelihood per token.

    Args:
        chosen_B: [B] log pi(c).
        rejected_B: [B] log pi(r).
        chosen_lengths_B: [B] |c|, in tokens.
        rejected_lengths_B: [B] |r|.
        coefficient: weight of the odds ratio, lambda in the paper (0.1 to 0.25 there).

    Returns:
        [B] loss per pair.
    """
    check_responses(
        chosen_B=chosen_B,
        rejected_B=rejected_B,
        chosen_lengths_B=chosen_lengths_B,
        rejected_lengths_B=rejected_lengths_B,
    )
    check_not_negative(coefficient=coefficient)
    mean_chosen_B = mean_logprobs(chosen_B, chosen_lengths_B)
    log_odds_ratio_B = log_odds(mean_chosen_B) - log_odds(mean_logprobs(rejected_B, rejected_lengths_B))
    return -mean_chosen_B - coefficient * logsigmoid(log_odds_ratio_B)


def simpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    chosen_lengths_B: Tensor,
    rejected_lengths_B: Tensor,
    *,
    beta: float,
    gamma: float,
) -> Tensor:
    """Simple preference optimisation, without a reference policy.

    l = -log sigmoid(beta log pi(c) / |c| - beta log pi(r) / |r| - gamma). gamma is the margin itself;
    settings called gamma_beta_ratio are gamma / beta.

    Source: Meng et al. 2024 (arXiv 2405.14734), equation 6.

    Arguments and result are [B], as in `orpo`; beta is positive (2 to 2.5 in the paper), gamma 0 or more
    (0.3 to 1.6 there).
    """
    check_responses(
        chosen_B=chosen_B,
        rejected_B=rejected_B,
        chosen_lengths_B=chosen_lengths_B,
        rejected_lengths_B=rejected_lengths_B,
    )
    check_positive(beta=beta)
    mean_chosen_B = mean_logprobs(chosen_B, chosen_lengths_B)
    return -logsigmoid(beta * (mean_chosen_B - mean_logprobs(rejected_B, rejected_lengths_B)) - gamma)


def kto_reference_point(log_ratio_total: float | Tensor, num_responses: Count) -> Tensor:
    """Estimate of KL(pi || ref) that `kto` measures from: max(0, mean of log pi(y') - log ref(y')).

    y' are responses of other prompts of the batch. The caller adds up the log-ratios over the whole
    step, on all ranks: the means of micro-batches, clamped one by one, are another number.

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), section 4.1.

    Args:
        log_ratio_total: [] sum over the step of log pi(y') - log ref(y'), in nats.
        num_responses: how many were added; 0 gives 0.

    Returns:
        [] nats, 0 or more, no gradient.
    """
    total = torch.as_tensor(log_ratio_total).detach()
    return (total / on_device_of(total, num_responses).clamp(min=1)).clamp(min=0)


def kto(
    policy_B: Tensor,
    reference_B: Tensor,
    desirable_B: Tensor,
    reference_point: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation of responses that are labelled good or bad, not compared.

    l = w_good (1 - sigmoid(beta (x - z))) where desirable, w_bad (1 - sigmoid(beta (z - x))) where
    not; x = log pi(y) - log ref(y) and z the reference point, in nats and without gradient.

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8.

    Args:
        policy_B: [B] log pi(y).
        reference_B: [B] log ref(y).
        desirable_B: [B] bool.
        reference_point: [] z from `kto_reference_point`.
        beta: risk aversion, positive: how soon the value saturates.
        desirable_weight: w_good; with unequal numbers of labels, weigh the rarer one up.
        undesirable_weight: w_bad.

    Returns:
        [B] loss per response, in [0, weight].
    """
    check_responses(policy_B=policy_B, reference_B=reference_B, desirable_B=desirable_B)
    check_positive(beta=beta)
    if desirable_B.dtype != torch.bool:
        refuse(f"desirable_B must be bool, it is {desirable_B.dtype}", why="good or bad", do="desirable_B > 0")
    point = reference_point.detach() if isinstance(reference_point, Tensor) else reference_point
    gains_B = implicit_reward(policy_B, reference_B, beta) - beta * point
    # 1 - sigmoid(x) is sigmoid(-x), which keeps its digits where the value saturates
    good_B, bad_B = torch.sigmoid(-gains_B), torch.sigmoid(gains_B)
    return torch.where(desirable_B, desirable_weight * good_B, undesirable_weight * bad_B)
