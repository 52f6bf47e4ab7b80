"""Triton row kernels for `reference.selected_logprob_and_entropy`, forward and backward.

Forward: one program a row reads the logits once, tile by tile, and keeps three running numbers
relative to the running maximum m: s = sum exp(z - m) and u = sum (z - m) exp(z - m). Then
lse = m + log s and entropy = log s - u / s. Keeping u relative to m, not as sum z exp(z - m),
spares the entropy the cancellation that logits far from 0 would cost it.

Backward: one program a tile of a row recomputes p = exp(z - lse) and writes the gradient once.

Columns beyond the vocabulary are -inf, the running maximum starts at -inf (a start of 0 loses rows
whose logits are all far below 0), sums are float32 whatever the logits are, and row offsets are
64-bit because T * V exceeds 2^31.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_LARGEST_TILE = 4096
SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


def selected_logprob_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Same meaning, arguments and results as `reference.selected_logprob_and_entropy`.

    Args:
        logits_TV: [T, V] float32, bfloat16 or float16; rows may be strided, a row must be contiguous
            or is copied.
        targets_T: [T] int64 in 0..V-1.
        temperature: positive.

    Returns:
        logprobs_T, entropy_T and lse_T, [T] each, float32, in nats.
    """
    assert temperature > 0, f"temperature must be positive, it is {temperature}"
    assert logits_TV.dtype in SUPPORTED, f"logits must be one of {SUPPORTED}, they are {logits_TV.dtype}"
    return _SelectedLogprobAndEntropy.apply(logits_TV, targets_T, float(temperature))  # type: ignore[return-value]


class _SelectedLogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        logits_TV = logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous()
        num_rows, vocab_size = logits_TV.shape
        logprobs_T, entropy_T, lse_T = (
            torch.empty(num_rows, dtype=torch.float32, device=logits_TV.device) for _ in range(3)
        )
        # a grid of no programs cannot be launched
        if num_rows > 0:
            tile, kernel = _tile(vocab_size), cast(Any, _forward_row)  # a launch is no call of the function
            kernel[(num_rows,)](
                logits_TV,
                targets_T.contiguous(),
                logprobs_T,
                entropy_T,
                lse_T,
                logits_TV.stride(0),
                vocab_size,
                temperature,
                TILE=tile,
                num_warps=_num_warps(tile),
            )
        ctx.save_for_backward(logits_TV, targets_T, lse_T, entropy_T)
        ctx.temperature = temperature
        return logprobs_T, entropy_T, lse_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_T: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, targets_T, lse_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)
        num_rows, vocab_size = logits_TV.shape
        if num_rows > 0:
            tile, kernel = _tile(vocab_size), cast(Any, _backward_tile)
            kernel[(num_rows, -(-vocab_size // tile))](
                logits_TV,
                targets_T.contiguous(),
                lse_T,
                entropy_T,
                *(grad_T.contiguous() for grad_T in grads_T),
                grad_TV,
                logits_TV.stride(0),
                vocab_size,
                ctx.temperature,
                TILE=tile,
                num_warps=_num_warps(tile),
            )
        return grad_TV, None, None


def _tile(vocab_size: int) -> int:
    return min(_LARGEST_TILE, 1 << (vocab_size - 1).bit_length())


def _num_warps(tile: int) -> int:
    return max(1, min(8, tile // 512))


@triton.jit
def _forward_row(
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    entropy_ptr,
    lse_ptr,
    row_stride,
    vocab_size,
    temperature,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab_size, TILE):
        columns = start + tl.arange(0, TILE)
        scaled = (
            tl.load(logits_ptr + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32) / temperature
        )
        now_largest = tl.maximum(largest, tl.max(scaled, axis=0))
        # while every logit so far is -inf there is nothing to be relative to, and -inf - -inf is NaN
        base = tl.where(now_largest == -float("inf"), 0.0, now_largest)
        moved = tl.where(largest == -float("inf"), 0.0, largest - base)
        shrink = tl.exp(moved)
        relative = scaled - base
        mass = tl.exp(relative)
        finite = tl.where(scaled == -float("inf"), 0.0, relative)
        weighted = (weighted + total * moved) * shrink + tl.sum(finite * mass, axis=0)
        total = total * shrink + tl.sum(mass, axis=0)
        largest = now_largest
    target = tl.load(targets_ptr + row)
    chosen = tl.load(logits_ptr + target).to(tl.float32) / temperature
    log_total = tl.log(total)
    tl.store(lse_ptr + row, largest + log_total)
    # not chosen - lse: of two large numbers the small difference is taken first, and keeps its digits
    tl.store(logprobs_ptr + row, (chosen - largest) - log_total)
    tl.store(entropy_ptr + row, log_total - weighted / total)


@triton.jit
def _backward_tile(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    grad_lse_ptr,
    grad_ptr,
    row_stride,
    vocab_size,
    temperature,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < vocab_size
    scaled = (
        tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=-float("inf")).to(tl.float32) / temperature
    )
    log_probs = scaled - tl.load(lse_ptr + row)
    # p log p is 0 where p is 0; 0 * -inf would be NaN
    finite = tl.where(log_probs == -float("inf"), 0.0, log_probs)
    grad_logprob = tl.load(grad_logprobs_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row)
    grad_lse = tl.load(grad_lse_ptr + row)
    slope = grad_lse - grad_logprob - grad_entropy * (finite + tl.load(entropy_ptr + row))
    chosen = tl.where(columns == tl.load(targets_ptr + row), grad_logprob, 0.0)
    grad = (chosen + tl.exp(log_probs) * slope) / temperature
    tl.store(grad_ptr + row * vocab_size + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
