"""Corrections for tokens that were not sampled by the policy that the trainer computes.

The engine that samples and the trainer disagree about probabilities, even with equal weights:
other kernels, other precision, experts routed differently. log_rho_t = log pi_old - log pi_behaviour,
the trainer's log-prob at the start of the step minus the engine's.

Each function gives a weight per token that multiplies the per-token loss. It has the type of its
input and no gradient. Weights of sequences are 0 at masked tokens and padding. A weight of 0 drops
the token from the numerator alone: the denominators of `rft_algos.losses.aggregation` were counted before
and stay, so that dropping tokens does not make the others count more. Several weights multiply.

Ratios go through `surrogates.ratio`, products over a sequence as sums of logs, so nothing overflows.

One name, different mathematics elsewhere: TRL's "sequence_mask" bounds the product of the ratios
and keeps it as the weight (here `mask_sequences`); ms-swift's bounds their geometric mean and keeps
the tokens' own ratios; "seq-mask-tis" of OpenRLHF and NeMo-RL bounds the geometric mean and keeps
the tokens' ratios without a cap. Here `mask_sequences_geometric` is the mask alone: multiply it with
`truncate_tokens` for the last two. verl applies some of its bounds to behaviour over old instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rft_algos.input_checks import check_bounds, check_positive
from rft_algos.packed.importance_ratio import log_ratio, ratio
from rft_algos.packed.segments import broadcast_to_tokens, segment_counts, segment_index, segment_means, segment_sums


def truncate_tokens(log_rho_T: Tensor, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling per token (TIS), on request with a lower bound too.

    w_t = max(min(rho_t, cap), floor).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training";
    truncation: Ionides 2008, "Truncated importance sampling".

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        cap: largest weight, positive.
        floor: smallest weight, at most `cap`; 0 for no lower bound, as published.

    Returns:
        [T] weights.
    """
    check_positive(cap=cap)
    check_bounds(floor, cap)
    return ratio(log_rho_T.detach()).clamp(floor, cap)


def truncate_sequences(
    log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, cap: float = 2.0, floor: float = 0.0
) -> Tensor:
    """Truncated importance sampling per sequence.

    w_i = max(min(product of rho_t over the loss tokens of sequence i, cap), floor), at each of them.

    The product is the exact weight of the whole sequence, with a variance that grows with its
    length: at 4,000 tokens a mean log-ratio of 0.0003 already makes it 3.

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        cap: largest weight, positive.
        floor: smallest weight, at most `cap`; 0 for no lower bound.

    Returns:
        [T] weights, equal within a sequence.
    """
    check_positive(cap=cap)
    check_bounds(floor, cap)
    places = segment_index(loss_mask_T, segment_ids_T)
    return broadcast_to_tokens(ratio(segment_sums(log_rho_T.detach(), places)).clamp(floor, cap), places)


def mask_tokens(log_rho_T: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Masked importance sampling per token (MIS, IcePop).

    w_t = rho_t where low <= rho_t <= high, 0 elsewhere.

    Source: Ling Team 2025, "Every Step Evolves" (arXiv 2510.18855), with its bounds.

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        low: smallest ratio that is kept.
        high: largest ratio that is kept.

    Returns:
        [T] weights.
    """
    check_bounds(low, high)
    return _within(ratio(log_rho_T.detach()), low, high)


def mask_sequences(log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, low: float, high: float) -> Tensor:
    """Masked importance sampling per sequence, by the product of its ratios.

    w_i = P_i where low <= P_i <= high, 0 elsewhere; P_i = product of rho_t over the loss tokens of i.

    Long sequences leave any bounds; watch the share of dropped ones by length.

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        low: smallest product that is kept; 0 for no lower bound.
        high: largest product that is kept.

    Returns:
        [T] weights, equal within a sequence.
    """
    check_bounds(low, high)
    places = segment_index(loss_mask_T, segment_ids_T)
    return broadcast_to_tokens(_within(ratio(segment_sums(log_rho_T.detach(), places)), low, high), places)


def mask_sequences_geometric(
    log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, low: float, high: float
) -> Tensor:
    """Mask of the sequences whose geometric mean of ratios lies within bounds.

    w_i = 1 where low <= exp(mean of log rho_t over the loss tokens of i) <= high, 0 elsewhere.

    The mean does not grow with the length, so the bounds are close to 1: 0.999 and 1.001 are common.

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        low: smallest geometric mean that is kept.
        high: largest geometric mean that is kept.

    Returns:
        [T] weights of 0 and 1, equal within a sequence.
    """
    check_bounds(low, high)
    places = segment_index(loss_mask_T, segment_ids_T)
    means_S = ratio(segment_means(log_rho_T, places))
    return broadcast_to_tokens(((means_S >= low) & (means_S <= high)).to(log_rho_T.dtype), places)


def off_policy_sequence_mask(
    behaviour_log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    delta: float,
) -> Tensor:
    """Drop bad sequences that the current policy would hardly sample any more.

    w_i = 0 where A_i < 0 and mean over the loss tokens t of i of (log pi_behaviour,t - log pi_t) > delta,
    1 elsewhere; A_i is the mean of the sequence's advantages.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1.

    Args:
        behaviour_log_ratio_T: [T] log pi_behaviour - log pi, in nats, with the current policy pi: the
            opposite sign of every other log-ratio here.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        delta: largest mean that is kept, in nats a token.

    Returns:
        [T] weights of 0 and 1, equal within a sequence.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    drift_S = segment_means(behaviour_log_ratio_T, places)
    dropped_S = (segment_means(advantages_T, places) < 0) & (drift_S > delta)
    return broadcast_to_tokens((~dropped_S).to(behaviour_log_ratio_T.dtype), places)


def veto_outliers(
    log_rho_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    low: float = 1e-4,
    high: float = math.inf,
) -> Tensor:
    """Drop every sequence in which a single token disagrees beyond reason.

    w_i = 1 where low <= rho_t <= high at all loss tokens t of sequence i, 0 elsewhere.

    A token that the trainer gives a ten-thousandth of the engine's probability points at a fault
    (a corrupt cache, a wrong template), not at rounding.

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        low: smallest ratio that a token may have.
        high: largest ratio that a token may have.

    Returns:
        [T] weights of 0 and 1, equal within a sequence.
    """
    check_bounds(low, high)
    places = segment_index(loss_mask_T, segment_ids_T)
    rho_T = ratio(log_rho_T)
    outliers_S = segment_sums(((rho_T < low) | (rho_T > high)).to(log_rho_T.dtype), places)
    return broadcast_to_tokens((outliers_S == 0).to(log_rho_T.dtype), places)


def mismatch_metrics(
    old_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure the trainer-engine mismatch, as (total, count) pairs that add up over cuts and ranks.

        mismatch/kl_k1                     mean of -log rho: KL(behaviour || old), unbiased, may be negative
        mismatch/kl_k3                     mean of rho - 1 - log rho: the same, never negative
        mismatch/weight                    mean of rho; 1 if both are the same policy
        mismatch/weight_square             mean of rho^2
        mismatch/sequence_weight           mean over sequences of P, the product of rho
        mismatch/sequence_weight_square    mean over sequences of P^2

    The effective share of the samples is mean(weight)^2 / mean(weight_square), for tokens and for
    sequences alike: `effective_sample_size` of the added totals, over the count.

    Args:
        old_logprobs_T: [T] log-probs of the trainer at the start of the step, in nats.
        behaviour_logprobs_T: [T] log-probs of the engine, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding. Sequences without loss tokens do not count.

    Returns:
        Name to (total [], count []), float64, no gradient. Divide after adding.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    kept_T = places.index_T < places.spare
    log_rho_T = _log_rho(old_logprobs_T, behaviour_logprobs_T, kept_T)
    # 0 in place of exp(0) = 1 at tokens that do not count
    rho_T = torch.where(kept_T, ratio(log_rho_T), 0.0)
    present_S = segment_counts(places, dtype=torch.float64) > 0
    # the empty product of a slot without tokens is 1, and would count as a sequence
    product_S = torch.where(present_S, ratio(segment_sums(log_rho_T, places)), 0.0)
    num_tokens, num_sequences = kept_T.sum().to(torch.float64), present_S.sum().to(torch.float64)
    return {
        "mismatch/kl_k1": (-log_rho_T.sum(), num_tokens),
        "mismatch/kl_k3": (torch.where(kept_T, rho_T - 1.0 - log_rho_T, 0.0).sum(), num_tokens),
        "mismatch/weight": (rho_T.sum(), num_tokens),
        "mismatch/weight_square": (rho_T.square().sum(), num_tokens),
        "mismatch/sequence_weight": (product_S.sum(), num_sequences),
        "mismatch/sequence_weight_square": (product_S.square().sum(), num_sequences),
    }


def mismatch_maxima(old_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, loss_mask_T: Tensor) -> dict[str, Tensor]:
    """The worst token, as maxima: over cuts and ranks take the largest.

        mismatch/ratio_max            largest rho
        mismatch/inverse_ratio_max    largest 1 / rho

    Args:
        old_logprobs_T: [T] log-probs of the trainer at the start of the step, in nats.
        behaviour_logprobs_T: [T] log-probs of the engine, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.

    Returns:
        Name to value [], float64, no gradient; 0 where there are no loss tokens.
    """
    log_rho_T = _log_rho(old_logprobs_T, behaviour_logprobs_T, loss_mask_T)
    return {
        "mismatch/ratio_max": _largest_ratio(log_rho_T, loss_mask_T),
        "mismatch/inverse_ratio_max": _largest_ratio(-log_rho_T, loss_mask_T),
    }


def effective_sample_size(total_weight: float, total_weight_square: float) -> float:
    """Compute the number of equally weighted samples that are worth as much as these.

    ESS = (sum w)^2 / sum w^2, between 0 and the number of samples; no tensors ([] totals as floats).

    Source: Kish 1965, "Survey Sampling".

    Args:
        total_weight: sum of the weights.
        total_weight_square: sum of their squares.

    Returns:
        A number of samples, 0 where all weights are 0.
    """
    return total_weight**2 / total_weight_square if total_weight_square > 0 else 0.0


def _within(weights: Tensor, low: float, high: float) -> Tensor:
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def _largest_ratio(log_ratio_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    if log_ratio_T.numel() == 0:
        return log_ratio_T.sum()  # of nothing: 0, where amax is an error
    highest = torch.where(loss_mask_T, log_ratio_T, -math.inf).amax()
    # the largest first: one exponential in place of T
    return torch.where(loss_mask_T.any(), ratio(highest), 0.0)


def _log_rho(old_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, kept_T: Tensor) -> Tensor:
    log_rho_T = log_ratio(old_logprobs_T.detach().to(torch.float64), behaviour_logprobs_T)
    return torch.where(kept_T, log_rho_T, 0.0)
