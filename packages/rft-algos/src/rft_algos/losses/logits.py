"""Log-probs and entropies from logits, in float32 at least and chunk by chunk, with exact gradients.

What is kept for the backward pass is the logits themselves and one number a token; the float32 distributions of a
chunk are made again there. So beside logits in bfloat16 and their gradient no tensor of that size is held.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft_algos.input_checks import check_positive, refuse
from rft_algos.packed.tensor_checks import check_tensors
from rft_algos.packed.tracing import is_traced

_CHUNK_ELEMENTS = 2**24
"""Logits of a chunk: 64 MiB in float32."""


def logprobs_from_logits(logits_TV: Tensor, token_ids_T: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log p_t(v_t) = x_t(v_t) / temperature - log sum_v exp(x_t(v) / temperature).

    Logits and tokens stand at the same place: for a causal model shift them first (logits[:, :-1], ids[:, 1:]).

    Args:
        logits_TV: [T, V], or [B, L, V] and so on, any floating type; the gradient flows through them. -inf forbids
            a token.
        token_ids_T: [T], or [B, L], int64 in 0..V-1; where a loss masks them later, any id in range.
        temperature: positive, divides the logits.

    Returns:
        [T] or [B, L] in nats; float32 (float64 for float64 logits). -inf for a token that the logits forbid.
    """
    check_tensors(logits_TV=logits_TV, token_ids_T=token_ids_T)
    _check(logits_TV, temperature)
    if token_ids_T.shape != logits_TV.shape[:-1]:
        refuse(f"{tuple(token_ids_T.shape)} token ids for logits {tuple(logits_TV.shape)}, which have one row a token")
    _check_ids(token_ids_T, logits_TV.shape[-1])
    rows_TV, ids_T = logits_TV.reshape(-1, logits_TV.shape[-1]), token_ids_T.reshape(-1)
    if is_traced():
        scaled_TV = _wide(rows_TV) / temperature
        found_T = scaled_TV.gather(1, ids_T[:, None])[:, 0] - scaled_TV.logsumexp(1)
    else:
        found_T = cast(Tensor, _LogProbs.apply(rows_TV, ids_T, temperature))  # pyright: ignore
    return found_T.reshape(token_ids_T.shape)


def entropy_from_logits(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H_t = -sum_v p_t(v) log p_t(v), p_t = softmax(x_t / temperature).

    A token of probability 0 adds 0.

    Args:
        logits_TV: [T, V], or [B, L, V] and so on, any floating type; the gradient flows through them.
        temperature: positive, divides the logits.

    Returns:
        [T] or [B, L] in nats, from 0 to log V; float32 (float64 for float64 logits).
    """
    _check(logits_TV, temperature)
    rows_TV = logits_TV.reshape(-1, logits_TV.shape[-1])
    if is_traced():
        found_T = _entropy(torch.log_softmax(_wide(rows_TV) / temperature, 1))
    else:
        found_T = cast(Tensor, _Entropy.apply(rows_TV, temperature))  # pyright: ignore
    return found_T.reshape(logits_TV.shape[:-1])


def _check(logits_TV: Tensor, temperature: float) -> None:
    check_positive(temperature=temperature)
    if not logits_TV.is_floating_point() or logits_TV.ndim < 2:
        refuse(f"logits must be floating rows [.., V], they are {logits_TV.dtype} of shape {tuple(logits_TV.shape)}")


def _check_ids(token_ids_T: Tensor, vocab_size: int) -> None:
    if token_ids_T.is_floating_point() or token_ids_T.dtype == torch.bool:
        refuse(f"token ids must be integers, they are {token_ids_T.dtype}", do="token_ids_T.long()")
    # a device is not asked for values, and its own check ends the process
    if is_traced() or not token_ids_T.is_cpu or token_ids_T.numel() == 0:
        return
    lowest, highest = (int(value) for value in token_ids_T.aminmax())
    if lowest < 0 or highest >= vocab_size:
        outside = lowest if lowest < 0 else highest
        refuse(
            f"token id {outside} for logits of {vocab_size} tokens",
            why="a label that is to be ignored, such as -100, has no logit: put any id there and mask it in the loss",
            do="token_ids_T.clamp(min=0)" if highest < vocab_size else "",
        )


def _wide(logits_TV: Tensor) -> Tensor:
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


def _entropy(logprobs_TV: Tensor) -> Tensor:
    # a log-prob of -inf would make 0 * inf, in the value and in the gradient
    return -(logprobs_TV.exp() * logprobs_TV.clamp(min=torch.finfo(logprobs_TV.dtype).min)).sum(1)


def _num_rows(logits_TV: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // max(logits_TV.shape[1], 1))


class _LogProbs(torch.autograd.Function):
    """d log p(v_t) / d x(v) = (1[v = v_t] - p(v)) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, ids_T: Tensor, temperature: float) -> Tensor:  # pyright: ignore
        step = _num_rows(logits_TV)
        found_T = logits_TV.new_empty(ids_T.shape, dtype=torch.promote_types(logits_TV.dtype, torch.float32))
        normalisers_T = torch.empty_like(found_T)
        for start in range(0, ids_T.shape[0], step):
            rows = slice(start, start + step)
            scaled_RV = _wide(logits_TV[rows]) / temperature
            normalisers_T[rows] = scaled_RV.logsumexp(1)
            found_T[rows] = scaled_RV.gather(1, ids_T[rows, None])[:, 0] - normalisers_T[rows]
        ctx.save_for_backward(logits_TV, ids_T, normalisers_T)
        ctx.temperature = temperature
        return found_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        logits_TV, ids_T, normalisers_T = ctx.saved_tensors
        step, gradient_TV = _num_rows(logits_TV), torch.empty_like(logits_TV)
        for start in range(0, ids_T.shape[0], step):
            rows = slice(start, start + step)
            own_R1 = gradient_T[rows, None] / ctx.temperature
            part_RV = (_wide(logits_TV[rows]) / ctx.temperature - normalisers_T[rows, None]).exp_().mul_(-own_R1)
            gradient_TV[rows] = part_RV.scatter_add_(1, ids_T[rows, None], own_R1).to(logits_TV.dtype)
        return gradient_TV, None, None


class _Entropy(torch.autograd.Function):
    """d H / d x(v) = -p(v) (log p(v) + H) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, temperature: float) -> Tensor:  # pyright: ignore
        step = _num_rows(logits_TV)
        found_T = logits_TV.new_empty(logits_TV.shape[:1], dtype=torch.promote_types(logits_TV.dtype, torch.float32))
        for start in range(0, logits_TV.shape[0], step):
            rows = slice(start, start + step)
            found_T[rows] = _entropy(torch.log_softmax(_wide(logits_TV[rows]) / temperature, 1))
        ctx.save_for_backward(logits_TV, found_T)
        ctx.temperature = temperature
        return found_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        logits_TV, entropy_T = ctx.saved_tensors
        step, gradient_TV = _num_rows(logits_TV), torch.empty_like(logits_TV)
        for start in range(0, logits_TV.shape[0], step):
            rows = slice(start, start + step)
            logprobs_RV = torch.log_softmax(_wide(logits_TV[rows]) / ctx.temperature, 1)
            finite_RV = logprobs_RV.clamp(min=torch.finfo(logprobs_RV.dtype).min / 2)
            own_R1 = gradient_T[rows, None] / ctx.temperature
            part_RV = logprobs_RV.exp() * (finite_RV + entropy_T[rows, None]) * -own_R1
            gradient_TV[rows] = part_RV.to(logits_TV.dtype)
        return gradient_TV, None
