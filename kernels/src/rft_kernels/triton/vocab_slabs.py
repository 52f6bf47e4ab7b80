"""Triton kernels over slabs of products that a library matmul has written: row sums, and the gradient in place.

A slab is read once for the sums and read and written once for the gradient, in place; nothing else of
its size is made. Equations and arguments are in `reference_slabs`. Sums are float32 whatever the products
are, row offsets are 64-bit because R times the row stride exceeds 2^31, and nothing is added by atomics, so
equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft_kernels.row_statistics import IGNORED, SlabSums, num_parts
from rft_kernels.triton.merge import empty_sums
from rft_kernels.triton.row_kernels import SUPPORTED
from rft_kernels.triton.tile_loads import join_tile, logits_of, own_columns, store_sums

_TILE = 8192
"""Logits of a tile: with 8 warps 32 a thread, four 16-byte loads of bfloat16 in flight."""
_NARROW = 2048
"""A slab narrower than this shares its tile with further rows, at most `_MOST_ROWS`."""
_MOST_ROWS = 16


def slab_sums(
    products_RC: Tensor,
    targets_R: Tensor,
    start: int,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_C: Tensor | None = None,
) -> SlabSums:
    """Same meaning, arguments and results as `reference_slabs.slab_sums`, for the types in `SUPPORTED`."""
    _check(products_RC, targets_R, temperature)
    products_RC = products_RC if products_RC.stride(-1) == 1 else products_RC.contiguous()
    num_rows, num_columns = products_RC.shape
    sums = empty_sums((num_rows,), products_RC.device)
    if num_rows > 0:
        rows, tile = _tile_shape(num_rows, num_columns)
        kernel = cast(Any, _slab_sums_rows)  # a launch is no call of the function
        with torch.cuda.device_of(products_RC):
            kernel[(num_parts(num_rows, rows),)](
                products_RC,
                # any pointer will do without a bias: HAS_BIAS takes the loads out of the kernel
                products_RC if bias_C is None else bias_C.contiguous(),
                targets_R.contiguous(),
                *sums,
                num_rows,
                num_columns,
                products_RC.stride(0),
                start,
                0.0 if softcap is None else softcap,
                1.0 / temperature,
                IGNORED=IGNORED,
                HAS_BIAS=bias_C is not None,
                HAS_SOFTCAP=softcap is not None,
                ROWS=rows,
                TILE=tile,
                num_warps=_num_warps(rows * tile),
            )
    return sums


def slab_gradients(
    products_RC: Tensor,
    targets_R: Tensor,
    start: int,
    normalizer_R: Tensor,
    entropy_R: Tensor,
    grad_R: Tensor,
    entropy_grad_R: Tensor | None,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Same meaning, arguments and result as `reference_slabs.slab_gradients`: `products_RC`, overwritten."""
    _check(products_RC, targets_R, temperature)
    assert products_RC.stride(-1) == 1, "the gradient is written in place, so a row must be contiguous"
    num_rows, num_columns = products_RC.shape
    if num_rows > 0:
        rows, tile = _tile_shape(num_rows, num_columns)
        kernel = cast(Any, _slab_gradient_tile)
        # the second `grad_R` is only a pointer to fill the place: HAS_ENTROPY_GRAD is false then
        row_numbers = (normalizer_R, entropy_R, grad_R, grad_R if entropy_grad_R is None else entropy_grad_R)
        with torch.cuda.device_of(products_RC):
            kernel[(num_parts(num_rows, rows), num_parts(num_columns, tile))](
                products_RC,
                products_RC if bias_C is None else bias_C.contiguous(),
                targets_R.contiguous(),
                *(numbers_R.float().contiguous() for numbers_R in row_numbers),
                num_rows,
                num_columns,
                products_RC.stride(0),
                start,
                0.0 if softcap is None else softcap,
                1.0 / temperature,
                IGNORED=IGNORED,
                HAS_BIAS=bias_C is not None,
                HAS_SOFTCAP=softcap is not None,
                HAS_ENTROPY_GRAD=entropy_grad_R is not None,
                ROWS=rows,
                TILE=tile,
                num_warps=_num_warps(rows * tile),
            )
    return products_RC


def _check(products_RC: Tensor, targets_R: Tensor, temperature: float) -> None:
    assert temperature > 0, f"temperature must be positive, it is {temperature}"
    assert products_RC.dtype in SUPPORTED, f"products must be one of {SUPPORTED}, they are {products_RC.dtype}"
    assert targets_R.dtype == torch.int64, f"targets must be int64, they are {targets_R.dtype}"


def _tile_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Rows and columns of a tile; both are powers of 2."""
    tile = min(_TILE, _power_of_2(num_columns))
    return min(max(1, min(_MOST_ROWS, _NARROW // tile)), _power_of_2(num_rows)), tile


def _power_of_2(length: int) -> int:
    """The lowest that is not below."""
    return 1 << (length - 1).bit_length()


def _num_warps(elements: int) -> int:
    return max(1, min(8, elements // 512))


# `start` is another one in every slab: no variant of the kernel is compiled for 1 or for multiples of 16
@triton.jit(do_not_specialize=["start"])
def _slab_sums_rows(
    products_ptr,
    bias_ptr,
    targets_ptr,
    highest_ptr,
    total_ptr,
    moment_ptr,
    target_ptr,
    argmax_ptr,
    num_rows,
    num_columns,
    row_stride,
    start,
    softcap,
    inverse_temperature,
    IGNORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    row_ptr = products_ptr + rows.to(tl.int64) * row_stride
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    best = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_columns, TILE):
        columns = first + tl.arange(0, TILE)
        column_inside = columns < num_columns
        inside = row_inside[:, None] & column_inside[None, :]
        products = tl.load(row_ptr[:, None] + columns[None, :], mask=inside, other=0.0)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        logits = logits_of(products, bias, softcap, inverse_temperature, HAS_SOFTCAP)
        # here and not in the load above: the softcap would make -c of -inf
        logits = tl.where(inside, logits, -float("inf"))
        highest, total, moment, best = join_tile(highest, total, moment, best, logits, columns)
    targets = tl.load(targets_ptr + rows, mask=row_inside, other=IGNORED)
    own_column = own_columns(targets, start, num_columns, IGNORED)
    in_slab = own_column >= 0
    own_bias = 0.0
    if HAS_BIAS:
        own_bias = tl.load(bias_ptr + own_column, mask=in_slab, other=0.0).to(tl.float32)
    # one more load a row, in place of a comparison with every column of every tile
    own_product = tl.load(row_ptr + own_column, mask=in_slab, other=0.0)
    # by the same function as the tile's logits, so that it is rounded alike
    own = logits_of(own_product, own_bias, softcap, inverse_temperature, HAS_SOFTCAP)
    own = tl.where(in_slab, own, tl.where(targets == IGNORED, float("inf"), -float("inf")))
    store_sums(
        highest_ptr,
        total_ptr,
        moment_ptr,
        target_ptr,
        argmax_ptr,
        rows,
        row_inside,
        highest,
        total,
        moment,
        own,
        best.to(tl.int64) + start,
    )


@triton.jit(do_not_specialize=["start"])
def _slab_gradient_tile(
    products_ptr,
    bias_ptr,
    targets_ptr,
    normalizer_ptr,
    entropy_ptr,
    grad_ptr,
    entropy_grad_ptr,
    num_rows,
    num_columns,
    row_stride,
    start,
    softcap,
    inverse_temperature,
    IGNORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column_inside = columns < num_columns
    inside = row_inside[:, None] & column_inside[None, :]
    place = products_ptr + (rows.to(tl.int64) * row_stride)[:, None] + columns[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    logits = logits_of(
        tl.load(place, mask=inside, other=-float("inf")), bias, softcap, inverse_temperature, HAS_SOFTCAP
    )
    targets = tl.load(targets_ptr + rows, mask=row_inside, other=IGNORED)
    grad = tl.load(grad_ptr + rows, mask=row_inside, other=0.0)
    log_probs = logits - tl.load(normalizer_ptr + rows, mask=row_inside, other=0.0)[:, None]
    probs = tl.exp(log_probs)
    slope = grad[:, None] + tl.zeros_like(log_probs)
    if HAS_ENTROPY_GRAD:
        entropy = tl.load(entropy_ptr + rows, mask=row_inside, other=0.0)
        entropy_grad = tl.load(entropy_grad_ptr + rows, mask=row_inside, other=0.0)
        # p log p is 0 where p is 0; 0 * -inf would be NaN
        finite = tl.where(log_probs == -float("inf"), 0.0, log_probs)
        slope += entropy_grad[:, None] * (finite + entropy[:, None])
    own = columns[None, :] == own_columns(targets, start, num_columns, IGNORED)[:, None]
    gradient = tl.where(own, grad[:, None], 0.0) - probs * slope
    if HAS_SOFTCAP:
        # tanh, read back from the logit in place of the product
        share = logits / (softcap * inverse_temperature)
        gradient *= 1.0 - share * share
    gradient = tl.where((targets != IGNORED)[:, None], gradient * inverse_temperature, 0.0)
    tl.store(place, gradient.to(products_ptr.dtype.element_ty), mask=inside)
