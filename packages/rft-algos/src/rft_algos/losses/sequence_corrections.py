"""Further corrections for tokens of another policy: geometric weights, divergence masks, normalised weights.

log_rho_t = log pi_old - log pi_behaviour, and weights as in `rft_algos.losses.off_policy`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rft_algos.input_checks import check_bounds, check_not_negative, check_positive, refuse
from rft_algos.losses.aggregation import Count, on_device_of
from rft_algos.packed.importance_ratio import LOG_RATIO_LIMIT, ratio
from rft_algos.packed.segments import broadcast_to_tokens, segment_index, segment_means, segment_sums
from rft_algos.packed.tensor_checks import check_mask

Measure = Literal["mean_k2", "mean_k3", "max_k2", "max_k3"]
"""How the divergence of a sequence is made of those of its tokens."""


def truncate_geometric(
    log_rho_T: Tensor, loss_mask_T: Tensor, segment_ids_T: Tensor, cap: float = 2.0, floor: float = 0.0
) -> Tensor:
    """Weigh sequences by the geometric mean of their ratios, truncated.

    w_i = max(min(exp(mean of log rho_t over the loss tokens of i), cap), floor), at each of them.

    Biased, with a variance that does not grow with the length: the ratio of GSPO (arXiv 2507.18071, equation 7) as a
    weight between engine and trainer.

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
    return broadcast_to_tokens(ratio(segment_means(log_rho_T.detach(), places)).clamp(floor, cap), places)


def mask_sequences_divergence(
    log_rho_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    limit: float,
    measure: Measure = "mean_k3",
) -> Tensor:
    """Drop the sequences on which engine and trainer are too far apart.

    w_i = 1 where D_i <= limit, 0 elsewhere; D_i is the mean or the maximum, over the loss tokens of sequence i, of
    k2_t = (log rho_t)^2 / 2 or k3_t = rho_t - 1 - log rho_t.

    Both estimate KL(behaviour || old) and are never negative, so a token that fell and one that rose do not cancel as
    in `mask_sequences_geometric`. A maximum bounds the worst token, as the bounds of trust regions over sequences ask.

    Source: Li et al. 2025, "Trust region masking for long-horizon LLM reinforcement learning"; estimators: Schulman
    2020, "Approximating KL divergence".

    Args:
        log_rho_T: [T] log pi_old - log pi_behaviour, in nats.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        limit: largest divergence that is kept, in nats, 0 or more.
        measure: "mean_k2", "mean_k3", "max_k2" or "max_k3".

    Returns:
        [T] weights of 0 and 1, equal within a sequence.
    """
    check_not_negative(limit=limit)
    if measure not in get_args(Measure):
        refuse(f"measure must be one of {', '.join(get_args(Measure))}, it is {measure!r}")
    places = segment_index(loss_mask_T, segment_ids_T)
    bounded_T = log_rho_T.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distances_T = bounded_T.square() / 2 if measure.endswith("k2") else torch.expm1(bounded_T) - bounded_T
    if measure.startswith("mean"):
        kept_S = segment_means(distances_T, places) <= limit
    else:
        # no token beyond the limit: a maximum over slots needs no operation of its own
        kept_S = segment_sums((distances_T > limit).to(distances_T.dtype), places) == 0
    return broadcast_to_tokens(kept_S.to(log_rho_T.dtype), places)


def self_normalised(
    weights_T: Tensor, loss_mask_T: Tensor, *, total_weight: Count | None = None, num_tokens: Count | None = None
) -> Tensor:
    """Scale weights to a mean of 1 over the step: v_t = w_t n / sum of w.

    Self-normalised importance sampling: biased, consistent, and free of the scale that a policy gives by being likelier
    everywhere. The sum is over the whole step, on all ranks: of a part it would depend on the cut.

    Source: Owen 2013, "Monte Carlo theory, methods and examples", section 9.2.

    Args:
        weights_T: [T] weights of tokens.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        total_weight: sum of the weights over the loss tokens of the step; None for these tokens.
        num_tokens: loss tokens of the step; None for these.

    Returns:
        [T] weights, 0 where masked and where all weights are 0.
    """
    check_mask(loss_mask_T=loss_mask_T)
    kept_T = torch.where(loss_mask_T, weights_T.detach(), 0.0)
    total = kept_T.sum() if total_weight is None else on_device_of(kept_T, total_weight)
    number = loss_mask_T.sum() if num_tokens is None else num_tokens
    return torch.where(total > 0, kept_T * number / total, 0.0).to(weights_T.dtype)


def interpolated_logprobs(
    behaviour_logprobs_T: Tensor,
    logprobs_T: Tensor,
    *,
    behaviour_versions_T: Tensor,
    proximal_version: int,
    version: int,
) -> Tensor:
    """Approximate the log-probs of a proximal policy between the one that sampled and the present one.

    log pi_prox,t = log pi_behaviour,t + a_t (log pi_t - log pi_behaviour,t),
    a_t = (proximal_version - v_t) / (version - v_t), clamped to [0, 1], v_t the version that sampled token t.

    It spares the forward pass that decoupled PPO makes for its proximal policy. A token sampled by the present version
    has a_t = 1: no version lies between.

    Source: the log-linear approximation of AReaL's documentation ("Proximal log-probability approximation"); decoupled
    PPO: arXiv 2110.00641 and 2505.24298.

    Args:
        behaviour_logprobs_T: [T] log-probs of the engine that sampled, in nats.
        logprobs_T: [T] log-probs of the current policy, in nats.
        behaviour_versions_T: [T] int64 version of the weights that sampled each token.
        proximal_version: version of the weights at the start of the step.
        version: version of the current weights, at least `proximal_version`.

    Returns:
        [T] log-probs in nats, no gradient.
    """
    if version < proximal_version:
        refuse(f"version = {version} must be at least proximal_version = {proximal_version}")
    distance_T = version - behaviour_versions_T
    share_T = (proximal_version - behaviour_versions_T) / distance_T.clamp(min=1)
    share_T = torch.where(distance_T > 0, share_T, 1.0).clamp(0, 1).to(logprobs_T.dtype)
    return torch.lerp(behaviour_logprobs_T.detach().to(logprobs_T.dtype), logprobs_T.detach(), share_T)
