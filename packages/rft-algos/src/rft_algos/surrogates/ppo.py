"""The clipped surrogate of PPO and its relatives: separate bounds, a second clip for negative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.input_checks import check_clip, refuse
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_alike


def ppo_clip(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Clipped surrogate of PPO, as a loss.

    l_t = max(-A_t r_t, -A_t clip(r_t, 1 - clip_low, 1 + clip_high)),
    r_t = exp(clamp(log_ratio_t, -20, 20)); beyond +-20 the gradient is exactly zero (`ratio`).

    Where the clip is active (`ppo_clipped`) the loss is constant and gives no gradient.

    Sources: Schulman et al. 2017 (arXiv 1707.06347), equation 7; unequal bounds ("clip-higher")
    from Yu et al. 2025, "DAPO" (arXiv 2503.14476).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        clip_low: how far below 1 the ratio may go, in (0, 1).
        clip_high: how far above 1 the ratio may go, positive.

    Returns:
        [T] loss per token. At log_ratio 0 it is -A_t, with gradient -A_t.
    """
    check_alike(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    check_clip(clip_low=clip_low, clip_high=clip_high)
    ratio_T, weights_T = ratio(log_ratio_T), -advantages_T
    # the clipped side is detached: where it decides, the loss is a constant
    free_T, clipped_T = weights_T * ratio_T, weights_T * ratio_T.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    # the larger of the two; not `maximum`, whose gradient takes three times as long
    return torch.where(clipped_T > free_T.detach(), clipped_T, free_T)


def ppo_clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Mask the tokens where the clip of `ppo_clip` decides the loss, so that the token gives no gradient.

    (A_t > 0 and r_t > 1 + clip_high) or (A_t < 0 and r_t < 1 - clip_low).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.

    Returns:
        [T] bool.
    """
    ratio_T = ratio(log_ratio_T)
    too_high = (advantages_T > 0) & (ratio_T > 1.0 + clip_high)
    too_low = (advantages_T < 0) & (ratio_T < 1.0 - clip_low)
    return too_high | too_low


def dual_clip(
    log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual: float = 3.0
) -> Tensor:
    """PPO's clipped surrogate with a second clip where the advantage is negative, as a loss.

    l_t = min(ppo_clip_t, dual |A_t|).

    A bad token that the policy has made much likelier gives PPO an unbounded loss; here it is at
    most dual |A_t|, and constant beyond. A positive advantage gives a negative loss, which the
    bound never touches.

    Source: Ye et al. 2019, "Mastering Complex Control in MOBA Games" (arXiv 1912.09729).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.
        dual: largest ratio that counts at negative advantages, above 1.

    Returns:
        [T] loss per token.
    """
    if not dual > 1.0:
        refuse(f"dual must be above 1, it is {dual}")
    loss_T, bound_T = ppo_clip(log_ratio_T, advantages_T, clip_low, clip_high), dual * advantages_T.abs()
    return torch.where(loss_T.detach() > bound_T, bound_T, loss_T)


def dual_clipped(
    log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, dual: float = 3.0
) -> Tensor:
    """Mask the tokens where a clip of `dual_clip` decides the loss, so that the token gives no gradient.

    `ppo_clipped`, or A_t < 0 and r_t > dual.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.
        dual: as in `dual_clip`.

    Returns:
        [T] bool.
    """
    too_far = (advantages_T < 0) & (ratio(log_ratio_T) > dual)
    return ppo_clipped(log_ratio_T, advantages_T, clip_low, clip_high) | too_far


def two_sided(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, delta: float) -> Tensor:
    """Two-sided clipping of INTELLECT-2: the unclipped term, too, has an upper bound on its ratio.

    l_t = max(-A_t min(r_t, delta), -A_t clip(r_t, 1 - clip_low, 1 + clip_high)).

    With delta > 1 + clip_high, which is required, the bound acts at negative advantages alone, and
    the equation is `dual_clip` with dual = delta.

    Source: Prime Intellect 2025, "INTELLECT-2" (arXiv 2505.07291).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats; the gradient flows through it.
        advantages_T: [T] advantages, no gradient.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.
        delta: largest ratio of the unclipped term, above 1 + clip_high.

    Returns:
        [T] loss per token.
    """
    check_alike(log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    if not delta > 1.0 + clip_high:
        refuse(f"delta must be above 1 + clip_high = {1.0 + clip_high}, it is {delta}")
    return dual_clip(log_ratio_T, advantages_T, clip_low, clip_high, dual=delta)


def two_sided_clipped(
    log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float, delta: float
) -> Tensor:
    """Mask the tokens where a clip of `two_sided` decides the loss, so that the token gives no gradient.

    `ppo_clipped`, or A_t < 0 and r_t > delta.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages.
        clip_low: as in `ppo_clip`.
        clip_high: as in `ppo_clip`.
        delta: as in `two_sided`.

    Returns:
        [T] bool.
    """
    return dual_clipped(log_ratio_T, advantages_T, clip_low, clip_high, dual=delta)


@register_equation(components.PpoClip)
def _ppo_clip(choice: components.PpoClip, tokens: Tokens) -> Tensor:
    return ppo_clip(tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.PpoClip)
def _ppo_clipped(choice: components.PpoClip, tokens: Tokens) -> Tensor:
    return ppo_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_equation(components.DualClip)
def _dual_clip(choice: components.DualClip, tokens: Tokens) -> Tensor:
    return dual_clip(tokens.log_ratio, tokens.advantages, choice.low, choice.high, choice.dual)


@register_clip_mask(components.DualClip)
def _dual_clipped(choice: components.DualClip, tokens: Tokens) -> Tensor:
    return dual_clipped(tokens.log_ratio, tokens.advantages, choice.low, choice.high, choice.dual)
