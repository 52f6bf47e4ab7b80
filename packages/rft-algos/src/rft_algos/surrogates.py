"""Surrogates: what the policy minimises, token by token, as a function of the log-ratio.

Every function takes log_ratio_T = log pi(token) - log pi_old(token) and gives an unreduced loss.
Reduction is the caller's (`rft_algos.reductions`).
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp. float32 overflows at 88, and infinity times a zero
gradient is NaN; a ratio of exp(20) = 4.9e8 is already far outside any trust region. The gradient
is exactly zero beyond the limit, so the share of such tokens is a metric, never a silence."""


def ratio(log_ratio_T: Tensor) -> Tensor:
    """Importance ratio r = exp(clamp(log_ratio, -20, 20)).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.

    Returns:
        [T] ratios in [exp(-20), exp(20)], with zero gradient outside +-20 (`LOG_RATIO_LIMIT`).
        NaN stays NaN.
    """
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def is_clamped(log_ratio_T: Tensor) -> Tensor:
    """Where `ratio` had to clamp: |log_ratio| > 20.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.

    Returns:
        [T] bool.
    """
    return log_ratio_T.abs() > LOG_RATIO_LIMIT


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
    ratio_T = ratio(log_ratio_T)
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return (-advantages_T * ratio_T).maximum(-advantages_T * clipped_T)


def ppo_clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clip of `ppo_clip` decides the loss, so that the token gives no gradient.

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
