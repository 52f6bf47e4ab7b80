"""Estimators of KL(pi || pi_ref) from the log-probs of sampled tokens.

x_t = log pi(token) - log pi_ref(token), tokens sampled from pi. Each function gives one value per
token, unreduced. k1 and k3 are unbiased as values; k2 is biased but its gradient, taken as a loss,
is the gradient of KL(pi || pi_ref). See Schulman 2020, "Approximating KL divergence"
(http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.surrogates import LOG_RATIO_LIMIT


def k1(log_ratio_T: Tensor) -> Tensor:
    """k1_t = x_t: unbiased, high variance, may be negative.

    Right as a penalty in the reward. As a loss its expected gradient is zero, so there it only
    adds noise.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    return log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """k2_t = x_t^2 / 2: biased, low variance, never negative; right gradient as a loss.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    return log_ratio_T.square() / 2


def k3(log_ratio_T: Tensor) -> Tensor:
    """k3_t = exp(-x_t) - 1 + x_t: unbiased, low variance, never negative.

    Its gradient as a loss is that of the reverse divergence KL(pi_ref || pi); this is the term of
    GRPO (arXiv 2402.03300, equation 4).

    x is clamped from below at -20 before anything else, because exp(-x) overflows there; such a
    token has the constant value exp(20) - 21 and zero gradient (`is_clamped` counts them). Above,
    nothing overflows and nothing is clamped. Clamping the exponential alone would leave the
    gradient of the linear term, which pushes x further down.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] estimates, in nats.
    """
    bounded_T = log_ratio_T.clamp(min=-LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where nearly all tokens are
    return torch.expm1(-bounded_T) + bounded_T


def is_clamped(log_ratio_T: Tensor) -> Tensor:
    """Where `k3` had to clamp: x_t < -20.

    Args:
        log_ratio_T: [T] log pi - log pi_ref, in nats.

    Returns:
        [T] bool.
    """
    return log_ratio_T < -LOG_RATIO_LIMIT
