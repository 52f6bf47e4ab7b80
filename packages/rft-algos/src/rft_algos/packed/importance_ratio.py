"""The importance ratio of a token, and its limit."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import hardtanh

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp. float32 overflows at 88, and infinity times a zero
gradient is NaN; a ratio of exp(20) = 4.9e8 is already far outside any trust region. The gradient
is exactly zero beyond the limit, so the share of such tokens is a metric, never a silence."""


def ratio(log_ratio_T: Tensor) -> Tensor:
    """Importance ratio r = exp(clamp(log_ratio, -20, 20)).

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.

    Returns:
        [T] ratios in [exp(-20), exp(20)], with zero gradient from +-20 on (`LOG_RATIO_LIMIT`).
        NaN stays NaN.
    """
    # hardtanh is a clamp whose gradient is one pass; that of `clamp` takes longer than exp
    return hardtanh(log_ratio_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def is_clamped(log_ratio_T: Tensor) -> Tensor:
    """Mask the tokens where `ratio` had to clamp: |log_ratio| > 20.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.

    Returns:
        [T] bool.
    """
    return log_ratio_T.abs() > LOG_RATIO_LIMIT
