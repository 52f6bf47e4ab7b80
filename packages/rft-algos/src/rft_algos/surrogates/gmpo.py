"""Geometric-Mean Policy Optimization: tokens are clipped one by one, the ratio is their geometric mean."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.input_checks import check_not_negative
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.segments import broadcast_to_tokens, segment_index, segment_means


def gmpo(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """Surrogate of GMPO, as a loss.

    x_t = min(log_ratio_t, clip_high) where A_i > 0, max(log_ratio_t, -clip_low) where A_i < 0,
    l_t = -A_i exp(mean of x over the loss tokens of sequence i) at every loss token of i,

    where A_i is the mean of the sequence's advantages. As in PPO, the clip acts only on the side
    that would push the ratio further; unlike in PPO, its bounds are in nats. The geometric mean
    keeps one outlying token from deciding the ratio of its sequence.

    `aggregation.sequence_mean_token_mean` gives the published objective.

    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization" (arXiv 2507.20673);
    the ratios of its experiments stay within exp(-0.4) and exp(0.4).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: how many nats the log-ratio of a token may go below 0.
        clip_high: how many nats it may go above 0.

    Returns:
        [T] loss per token, equal within a sequence; 0 where masked.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    places = segment_index(loss_mask_T, segment_ids_T)
    # one sign for a sequence, also where the advantages of its tokens differ
    advantages_S = segment_means(advantages_T, places)
    sign_T = broadcast_to_tokens(advantages_S, places)
    bounded_T = torch.where(sign_T < 0, log_ratio_T.clamp(min=-clip_low), log_ratio_T.clamp(max=clip_high))
    return broadcast_to_tokens(-advantages_S * ratio(segment_means(bounded_T, places)), places)


def gmpo_clipped(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """Mask the tokens where the clip of `gmpo` holds a token's log-ratio, so that the token gives no gradient.

    (A_i > 0 and log_ratio_t > clip_high) or (A_i < 0 and log_ratio_t < -clip_low).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: as in `gmpo`.
        clip_high: as in `gmpo`.

    Returns:
        [T] bool; false where masked.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    sign_T = broadcast_to_tokens(segment_means(advantages_T, places), places)  # 0 where masked, so neither side acts
    return ((sign_T > 0) & (log_ratio_T > clip_high)) | ((sign_T < 0) & (log_ratio_T < -clip_low))


@register_equation(components.Gmpo)
def _gmpo(choice: components.Gmpo, tokens: Tokens) -> Tensor:
    return gmpo(tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high)


@register_clip_mask(components.Gmpo)
def _gmpo_clipped(choice: components.Gmpo, tokens: Tokens) -> Tensor:
    return gmpo_clipped(tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high)
