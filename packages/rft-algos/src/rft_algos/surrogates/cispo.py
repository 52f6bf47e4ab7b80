"""CISPO: the importance weight is clipped, never the token's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.registry import register_clip_mask, register_equation
from rft_algos.input_checks import check_clip
from rft_algos.packed.importance_ratio import ratio
from rft_algos.packed.loss_tokens import Tokens
from rft_algos.packed.tensor_checks import check_alike


def cispo(
    logprobs_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float | None, clip_high: float
) -> Tensor:
    """Policy gradient with a clipped, detached importance weight, as a loss.

    l_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log pi_t.

    Where PPO's clip takes the gradient of a token away, this only bounds its weight. The authors
    leave the lower side open (`clip_low` None) and tune the upper one alone.

    Some implementations call the upper bound itself epsilon; here it is 1 + clip_high, as in the
    paper.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), equations 4 and 5.

    Args:
        logprobs_T: [T] log pi of the sampled tokens, in nats; the gradient flows through it alone. A token of -inf
            has loss and gradient 0.
        log_ratio_T: [T] log pi - log pi_old, in nats.
        advantages_T: [T] advantages, no gradient.
        clip_low: how far below 1 the weight may go; None for no lower bound.
        clip_high: how far above 1 the weight may go.

    Returns:
        [T] loss per token. Its gradient is -clip(r_t) A_t; its value means nothing.
    """
    check_alike(logprobs_T=logprobs_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T)
    check_clip(clip_low=clip_low, clip_high=clip_high)
    low = None if clip_low is None else 1.0 - clip_low
    weights_T = ratio(log_ratio_T.detach()).clamp(low, 1.0 + clip_high)
    # a token without probability has no gradient, and its weight of 0 would make NaN
    return weights_T * -advantages_T * torch.where(logprobs_T.detach() == -torch.inf, 0.0, logprobs_T)


def cispo_clipped(log_ratio_T: Tensor, clip_low: float | None, clip_high: float) -> Tensor:
    """Mask the tokens where the weight of `cispo` was clipped; such a token still gives a gradient.

    r_t > 1 + clip_high or r_t < 1 - clip_low.

    Args:
        log_ratio_T: [T] log pi - log pi_old, in nats.
        clip_low: as in `cispo`.
        clip_high: as in `cispo`.

    Returns:
        [T] bool.
    """
    ratio_T = ratio(log_ratio_T)
    too_high = ratio_T > 1.0 + clip_high
    return too_high if clip_low is None else too_high | (ratio_T < 1.0 - clip_low)


@register_equation(components.Cispo)
def _cispo(choice: components.Cispo, tokens: Tokens) -> Tensor:
    return cispo(tokens.logprobs, tokens.log_ratio, tokens.advantages, choice.low, choice.high)


@register_clip_mask(components.Cispo)
def _cispo_clipped(choice: components.Cispo, tokens: Tokens) -> Tensor:
    return cispo_clipped(tokens.log_ratio, choice.low, choice.high)
