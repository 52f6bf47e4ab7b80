"""Clipped Policy Gradient Optimization with Policy Drift: the clip acts on the log-prob, no ratio is left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.input_checks import check_clip, refuse
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_alike


def cpgd(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Clipped policy gradient of CPGD, as a loss.

    l_t = -A_t min(log pi_t, log pi_old,t + log(1 + clip_high)) where A_t > 0,
    l_t = -A_t max(log pi_t, log pi_old,t + log(1 - clip_low)) elsewhere.

    The gradient stops where PPO's would, and before that it is -A_t: it is not multiplied by the
    ratio, which the authors hold responsible for collapses. `policy_drift` is the other half of
    their objective.

    Source: Liu et al. 2025, "CPGD" (arXiv 2505.12504).

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it.
        old_logprobs_T: [T] log pi_old of the same tokens, in nats, no gradient.
        advantages_T: [T] advantages, no gradient.
        clip_low: how far below 1 the ratio may go, in (0, 1).
        clip_high: how far above 1 the ratio may go.

    Returns:
        [T] loss per token. Its value means nothing; at the old policy its gradient is -A_t.
    """
    check_alike(logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    if clip_low == 1:
        refuse("clip_low must be below 1: a log-prob has no lower bound there, it is 1")
    check_clip(clip_low=clip_low, clip_high=clip_high)
    highest_T, lowest_T = old_logprobs_T + math.log1p(clip_high), old_logprobs_T + math.log1p(-clip_low)
    bounded_T = torch.where(
        advantages_T > 0, logprobs_T.detach().minimum(highest_T), logprobs_T.detach().maximum(lowest_T)
    )
    # inside the bounds the log-prob with its gradient, outside a constant
    return -advantages_T * torch.where(bounded_T == logprobs_T.detach(), logprobs_T, bounded_T)


def cpgd_clipped(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Mask the tokens where the clip of `cpgd` decides the loss, so that the token gives no gradient.

    (A_t > 0 and log pi_t > log pi_old,t + log(1 + clip_high)) or
    (A_t < 0 and log pi_t < log pi_old,t + log(1 - clip_low)).

    Args:
        logprobs_T: [T] log pi, in nats.
        old_logprobs_T: [T] log pi_old, in nats.
        advantages_T: [T] advantages.
        clip_low: as in `cpgd`.
        clip_high: as in `cpgd`.

    Returns:
        [T] bool.
    """
    too_high = (advantages_T > 0) & (logprobs_T > old_logprobs_T + math.log1p(clip_high))
    too_low = (advantages_T < 0) & (logprobs_T < old_logprobs_T + math.log1p(-clip_low))
    return too_high | too_low


def policy_drift(log_ratio_T: Tensor, *, limit: float = 2.0) -> Tensor:
    """Penalty on drifting away from the old policy, an estimate of KL(pi_old || pi) from its tokens.

    d_t = r_t - 1 - log r_t where r_t <= 1 + limit; beyond, the tangent there:
    d_t = limit - log(1 + limit) + limit (log r_t - log(1 + limit)).

    The gradient is min(r_t - 1, limit): up to the limit that of the divergence, and never more than
    `limit`, where an unbounded ratio would let one token decide the step. No clamp is needed: the
    penalty still pulls back however far a token has gone.

    Source: Liu et al. 2025, "CPGD" (arXiv 2505.12504). Their code minimises
    min(sg[r_t] - 1, limit) log pi_t, which has this gradient and no value to look at; the limit is theirs.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats, at tokens sampled from pi_old; the gradient
            flows through it.
        limit: largest gradient of a token, positive.

    Returns:
        [T] estimates in nats, never negative, 0 at log_ratio 0.
    """
    if not limit > 0.0:
        refuse(f"limit must be positive, it is {limit}")
    bounded_T = log_ratio_T.clamp(max=math.log1p(limit))
    return torch.expm1(bounded_T) - bounded_T + limit * (log_ratio_T - bounded_T)


@register_equation(components.CpgdClip)
def _cpgd(choice: components.CpgdClip, tokens: Tokens) -> Tensor:
    return cpgd(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.CpgdClip)
def _cpgd_clipped(choice: components.CpgdClip, tokens: Tokens) -> Tensor:
    return cpgd_clipped(tokens.logprobs, tokens.old_logprobs, tokens.advantages, choice.low, choice.high)
