"""Torch references: what each kernel must equal, and what runs where Triton cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def selected_logprob_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of one token a row, entropy of the row and its log-sum-exp, of softmax(logits / temperature).

    With z = logits / temperature and p = softmax(z): lse = log sum_v exp(z_v),
    logprob = z_target - lse, entropy = lse - sum_v p_v z_v.

    Computed in float32 (float64 for float64 logits). All three results are differentiable, once;
    the backward pass keeps the logits and two numbers a row, not the probabilities.

    Args:
        logits_TV: [T, V] any floating type; -inf forbids a token, a row needs one finite logit.
        targets_T: [T] int64 in 0..V-1.
        temperature: positive.

    Returns:
        logprobs_T, entropy_T and lse_T, [T] each, in nats.
    """
    assert temperature > 0, f"temperature must be positive, it is {temperature}"
    return _SelectedLogprobAndEntropy.apply(logits_TV, targets_T, temperature)  # type: ignore[return-value]


def forward(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The values of `selected_logprob_and_entropy`, without a gradient.

    Args:
        logits_TV: [T, V] logits.
        targets_T: [T] int64.
        temperature: positive.

    Returns:
        logprobs_T, entropy_T and lse_T, [T] each, in nats.
    """
    scaled_TV = _scaled(logits_TV, temperature)
    lse_T = scaled_TV.logsumexp(dim=-1)
    # in place only in a tensor that `_scaled` made: the caller's logits are kept for the backward pass
    log_probs_TV = scaled_TV.sub_(lse_T[:, None]) if scaled_TV is not logits_TV else scaled_TV - lse_T[:, None]
    logprobs_T = log_probs_TV.gather(-1, targets_T[:, None])[:, 0]
    entropy_T = -(log_probs_TV.exp() * _finite(log_probs_TV)).sum(dim=-1)
    return logprobs_T, entropy_T, lse_T


def backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    lse_T: Tensor,
    entropy_T: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropy_T: Tensor,
    grad_lse_T: Tensor,
) -> Tensor:
    """Gradient of `selected_logprob_and_entropy` with respect to the logits.

    d logprob / d z_v = [v = target] - p_v, d lse / d z_v = p_v,
    d entropy / d z_v = -p_v (log p_v + entropy), and d z / d logits = 1 / temperature.

    Args:
        logits_TV: [T, V] logits.
        targets_T: [T] int64.
        temperature: positive.
        lse_T: [T] from `forward`.
        entropy_T: [T] from `forward`.
        grad_logprobs_T: [T] gradient of the loss by each log-prob.
        grad_entropy_T: [T] by each entropy.
        grad_lse_T: [T] by each log-sum-exp.

    Returns:
        [T, V] in the type of the logits.
    """
    log_probs_TV = _scaled(logits_TV, temperature) - lse_T[:, None]
    # `_finite` copies: what follows works in that copy, and at last in the log-probs themselves
    slope_TV = _finite(log_probs_TV).add_(entropy_T[:, None]).mul_(-grad_entropy_T[:, None])
    slope_TV.add_((grad_lse_T - grad_logprobs_T)[:, None]).mul_(log_probs_TV.exp_())
    slope_TV.scatter_add_(-1, targets_T[:, None], grad_logprobs_T[:, None])
    return slope_TV.div_(temperature).to(logits_TV.dtype)


class _SelectedLogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_T, entropy_T, lse_T = forward(logits_TV, targets_T, temperature)
        ctx.save_for_backward(logits_TV, targets_T, lse_T, entropy_T)
        ctx.temperature = temperature
        return logprobs_T, entropy_T, lse_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, targets_T, lse_T, entropy_T = ctx.saved_tensors
        return backward(logits_TV, targets_T, ctx.temperature, lse_T, entropy_T, *grads_T), None, None


def _scaled(logits_TV: Tensor, temperature: float) -> Tensor:
    logits = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def _finite(log_probs_TV: Tensor) -> Tensor:
    """A copy with 0 for -inf: p log p is 0 where p is 0, and 0 * -inf would be NaN."""
    return torch.where(log_probs_TV == -torch.inf, 0.0, log_probs_TV)
