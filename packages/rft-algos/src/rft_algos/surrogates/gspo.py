"""Group Sequence Policy Optimization: the importance ratio and the clip belong to whole sequences.

The losses stand at every loss token of their sequence and are 0 elsewhere, so that
`aggregation.sequence_mean_token_mean` gives the published objective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.segments import broadcast_to_tokens, segment_index, segment_means
from rft_algos.surrogates.ppo import ppo_clip, ppo_clipped


def gspo(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Sequence-level clipped surrogate of GSPO, as a loss.

    s_i = exp(mean over the tokens t of sequence i of log_ratio_t),
    l_t = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high)) at every loss token of i,

    where A_i is the mean of the sequence's advantages. The mean makes ratios of long and short
    sequences comparable, and so small that the clip is three orders of magnitude below PPO's. The
    gradient of a sequence's loss is spread evenly over its tokens.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 5 to 7;
    the bounds are those of its experiments.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: how far below 1 the ratio of a sequence may go.
        clip_high: how far above 1 it may go.

    Returns:
        [T] loss per token, equal within a sequence; 0 where masked.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    log_ratio_S, advantages_S = segment_means(log_ratio_T, places), segment_means(advantages_T, places)
    # clipped once a sequence, and only then spread over its tokens
    return broadcast_to_tokens(ppo_clip(log_ratio_S, advantages_S, clip_low, clip_high), places)


def gspo_clipped(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Mask the tokens where the clip of `gspo` decides the loss, so that the whole sequence gives no gradient.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: as in `gspo`.
        clip_high: as in `gspo`.

    Returns:
        [T] bool, equal within a sequence; false where masked.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    log_ratio_S, advantages_S = segment_means(log_ratio_T, places), segment_means(advantages_T, places)
    # the spare slot has a mean of 0, a ratio of 1, which no clip holds
    return ppo_clipped(log_ratio_S, advantages_S, clip_low, clip_high).index_select(0, places.index_T)


def gspo_token(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO-token: the sequence's ratio, with an advantage and a gradient of its own for every token.

    s_t = sg[s_i] pi_t / sg[pi_t], l_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high)),

    where s_i is that of `gspo` and sg stops the gradient. Its value is that of s_i. With equal
    advantages in a sequence, loss and gradient of `sequence_mean_token_mean` are those of `gspo`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 13 and 14.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        loss_mask_T: [T] bool; what stands at masked tokens, NaN included, reaches nothing.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: as in `gspo`.
        clip_high: as in `gspo`.

    Returns:
        [T] loss per token; 0 where masked.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    mean_T = broadcast_to_tokens(segment_means(log_ratio_T.detach(), places), places)
    # what stands at masked tokens must not reach the difference below
    if not places.keep_all:
        kept_T = places.index_T < places.spare
        log_ratio_T, advantages_T = torch.where(kept_T, log_ratio_T, mean_T), torch.where(kept_T, advantages_T, 0.0)
    # the mean's value, the token's own gradient; of an infinite log-ratio no gradient is left
    own_T = torch.where(log_ratio_T.detach().isinf(), 0.0, log_ratio_T)
    log_s_T = mean_T + (own_T - own_T.detach())
    return ppo_clip(log_s_T, advantages_T, clip_low, clip_high)


def gspo_token_clipped(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Mask the tokens where the clip of `gspo_token` decides the loss, so that the token gives no gradient.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        clip_low: as in `gspo`.
        clip_high: as in `gspo`.

    Returns:
        [T] bool; false where masked.
    """
    places = segment_index(loss_mask_T, segment_ids_T)
    log_s_T = broadcast_to_tokens(segment_means(log_ratio_T, places), places)  # 0 where masked, so neither side acts
    return ppo_clipped(log_s_T, advantages_T, clip_low, clip_high)


@register_equation(components.Gspo)
def _gspo(choice: components.Gspo, tokens: Tokens) -> Tensor:
    return gspo(tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high)


@register_equation(components.GspoToken)
def _gspo_token(choice: components.GspoToken, tokens: Tokens) -> Tensor:
    return gspo_token(tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high)


@register_clip_mask(components.GspoToken)
def _gspo_token_clipped(choice: components.GspoToken, tokens: Tokens) -> Tensor:
    return gspo_token_clipped(
        tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high
    )


@register_clip_mask(components.Gspo)
def _gspo_clipped(choice: components.Gspo, tokens: Tokens) -> Tensor:
    return gspo_clipped(tokens.log_ratio, tokens.advantages, tokens.mask, tokens.segment_ids, choice.low, choice.high)
