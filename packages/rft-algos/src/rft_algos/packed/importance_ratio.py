"""The importance ratio of a token, and its limit.

Log-probs of -inf stand where a truncation (top-p, top-k) or a constraint left a token out. One rule holds: a token to
which the current or the old policy gives no probability has no ratio, and is left out as a masked token is; the
denominators, counted before, stay. `policy_loss` and the losses of padded rows apply it (`Tokens.masked`). For who
calls a surrogate alone, `log_ratio` gives 0 without gradient there. NaN and +inf are faults and stay.
"""

from __future__ import annotations

import torch
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


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """log pi - log pi_old, and 0 without gradient where one of the two is -inf (`impossible_tokens`).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone.
        old_logprobs_T: [T] log pi_old of the same tokens, in nats.

    Returns:
        [T] log-ratios, in nats.
    """
    old_logprobs_T = old_logprobs_T.detach()
    impossible_T = impossible_tokens(logprobs_T, old_logprobs_T)
    # replaced before the subtraction: the gradient of infinity minus infinity is NaN wherever it is masked later
    return torch.where(impossible_T, 0.0, logprobs_T) - torch.where(impossible_T, 0.0, old_logprobs_T)


def impossible_tokens(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Mask the tokens to which one of the two policies gives no probability: a log-prob of -inf.

    Args:
        logprobs_T: [T] log pi, in nats.
        old_logprobs_T: [T] log pi_old, in nats.

    Returns:
        [T] bool.
    """
    return (logprobs_T.detach() == -torch.inf) | (old_logprobs_T.detach() == -torch.inf)


def is_clamped(log_ratio_T: Tensor) -> Tensor:
    """Mask the tokens where `ratio` had to clamp: |log_ratio| > 20.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.

    Returns:
        [T] bool.
    """
    return log_ratio_T.abs() > LOG_RATIO_LIMIT
