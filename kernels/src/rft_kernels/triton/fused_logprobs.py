"""Triton kernel that forms products h W^T itself and keeps of them five numbers a row and part of the vocabulary.

A program holds one tile of rows and goes through the vocabulary tiles of one part. A product stays in
registers: each tile is added to the rows' running sums (`tile_loads.join_tile`) and forgotten. Programs
that run at the same time share row tiles and a part, so both matrices come from the L2 cache. No sum
crosses programs, so equal inputs give equal bits.

16-bit inputs come through tensor descriptors where the device has them (compute capability 9.0 on) and the
matrices allow it (rows at multiples of 16 bytes), by pointers elsewhere; what lies outside a matrix is read
as 0, and columns beyond the vocabulary are -inf before they are summed.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from rft_kernels.row_statistics import IGNORED, SlabSums, num_parts
from rft_kernels.tiles import HOPPER, Tiles, default_splits, default_tiles
from rft_kernels.triton.merge import empty_sums
from rft_kernels.triton.row_kernels import SUPPORTED
from rft_kernels.triton.tile_loads import join_tile, logits_of, own_columns, store_sums


def fused_sums(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_V: Tensor | None = None,
    start: int = 0,
    splits: int | None = None,
    tiles: Tiles | None = None,
    descriptors: bool | None = None,
) -> SlabSums:
    """Same meaning, arguments and results as `reference_slabs.fused_sums`, for the types in `SUPPORTED`.

    Args:
        hidden_RD: [R, D].
        weight_VD: [V, D] of the same type.
        targets_R: [R] int64.
        temperature: positive.
        softcap: or None.
        bias_V: [V] or None.
        start: id of the matrix's first row.
        splits: parts of the vocabulary at most; None takes `default_splits`.
        tiles: how to cut; None takes `default_tiles`.
        descriptors: whether inputs come through tensor descriptors; None: where they can.
    """
    _check(hidden_RD, weight_VD, targets_R, temperature)
    hidden_RD, weight_VD = (x if x.stride(-1) == 1 else x.contiguous() for x in (hidden_RD, weight_VD))
    (num_rows, width), vocab_size = hidden_RD.shape, weight_VD.shape[0]
    tiles = tiles or default_tiles(hidden_RD.dtype, num_rows, _capability(hidden_RD))
    num_tiles = num_parts(vocab_size, tiles.vocab)
    splits = splits or default_splits(max(1, num_rows), vocab_size, tiles, _num_sms(hidden_RD))
    tiles_per_split = num_parts(num_tiles, min(splits, num_tiles))
    # counted again: with whole tiles in each, fewer parts may cover the vocabulary
    splits = num_parts(num_tiles, tiles_per_split)
    sums = empty_sums((splits, num_rows), hidden_RD.device)
    if num_rows == 0:
        return sums
    if descriptors is None:
        descriptors = _capability(hidden_RD) >= (9, 0) and _suits_descriptors(hidden_RD, weight_VD)
    kernel = cast(Any, _fused_tiles)  # a launch is no call of the function
    with torch.cuda.device_of(hidden_RD):
        kernel[(num_parts(num_rows, tiles.rows) * splits,)](
            _descriptor(hidden_RD, tiles.rows, tiles.hidden) if descriptors else hidden_RD,
            _descriptor(weight_VD, tiles.vocab, tiles.hidden) if descriptors else weight_VD,
            hidden_RD if bias_V is None else bias_V.contiguous(),
            targets_R.contiguous(),
            *sums,
            num_rows,
            vocab_size,
            width,
            hidden_RD.stride(0),
            weight_VD.stride(0),
            tiles_per_split,
            splits,
            start,
            0.0 if softcap is None else softcap,
            1.0 / temperature,
            IGNORED=IGNORED,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            DESCRIPTORS=descriptors,
            WHOLE_STEPS=width % tiles.hidden == 0,
            **_cut(tiles),
        )
    return sums


def measure(hidden_RD: Tensor, weight_VD: Tensor, choices: tuple[Tiles, ...] = HOPPER) -> list[tuple[float, Tiles]]:
    """(Median milliseconds, tiles) of `fused_sums` on these matrices on a GPU, fastest first.

    Args:
        hidden_RD: [R, D] on a GPU.
        weight_VD: [V, D] there.
        choices: tiles to measure; those that do not fit the device are left out.
    """
    targets_R = torch.zeros(hidden_RD.shape[0], dtype=torch.int64, device=hidden_RD.device)
    found: list[tuple[float, Tiles]] = []
    for tiles in choices:

        def run(tiles: Tiles = tiles) -> SlabSums:
            return fused_sums(hidden_RD, weight_VD, targets_R, temperature=1.0, tiles=tiles)

        try:
            found.append((float(cast(Any, do_bench)(run, return_mode="median")), tiles))
        except triton.OutOfResources:
            continue
    return sorted(found, key=lambda pair: pair[0])


def _cut(tiles: Tiles) -> dict[str, Any]:
    """The constants and options of a launch that the tiles decide."""
    options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    shape = {"ROWS": tiles.rows, "VOCAB": tiles.vocab, "HIDDEN": tiles.hidden}
    # the interpreter multiplies the bits of bfloat16 as integers; in float32 their products are exact
    widen = os.environ.get("TRITON_INTERPRET") == "1"
    return {**shape, "GROUP": tiles.group, "FLAT": tiles.flat, "WIDEN": widen, **options}


def _check(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, temperature: float) -> None:
    assert temperature > 0, f"temperature must be positive, it is {temperature}"
    assert hidden_RD.dtype in SUPPORTED, f"hidden states must be one of {SUPPORTED}, they are {hidden_RD.dtype}"
    assert weight_VD.dtype == hidden_RD.dtype, f"matrix {weight_VD.dtype}, hidden states {hidden_RD.dtype}"
    assert weight_VD.shape[1] == hidden_RD.shape[1], f"matrix {weight_VD.shape}, hidden states {hidden_RD.shape}"
    assert targets_R.dtype == torch.int64, f"targets must be int64, they are {targets_R.dtype}"


def _capability(tensor: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _num_sms(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def _suits_descriptors(*matrices: Tensor) -> bool:
    """Return whether the copy engine can read the tensors (rows and start at multiples of 16 bytes), and it pays.

    With float32 the products run without tensor cores and descriptors make the compiler spill registers.
    """
    return all(
        x.element_size() == 2 and x.data_ptr() % 16 == 0 and (x.stride(0) * x.element_size()) % 16 == 0
        for x in matrices
    )


def _descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


@triton.jit
def _place(program, num_row_tiles, splits, GROUP: tl.constexpr):
    """(Row tile, split) of a program: groups of row tiles after each other, in a group one split after another."""
    group = program // (GROUP * splits)
    first = group * GROUP
    size = tl.minimum(num_row_tiles - first, GROUP)
    within = program - first * splits
    return first + within % size, within // size


@triton.jit
def _load(
    matrix, first_row, first_column, num_rows, num_columns, row_stride, DESCRIPTORS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of a matrix, 0 outside it."""
    if DESCRIPTORS:
        tile = matrix.load([first_row, first_column])
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = first_column + tl.arange(0, COLUMNS)
        inside = (rows < num_rows)[:, None]
        # the last step reaches beyond the width only where HIDDEN does not divide it
        if not WHOLE_STEPS:
            inside = inside & (columns < num_columns)[None, :]
        tile = tl.load(matrix + (rows.to(tl.int64) * row_stride)[:, None] + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _products(
    hidden, weight, first_row, first_column, num_rows, vocab_size, width, hidden_stride, weight_stride,
    DESCRIPTORS: tl.constexpr, WHOLE_STEPS: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, VOCAB: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """[ROWS, VOCAB] float32 of h W^T, 0 outside both matrices."""
    products = tl.zeros([ROWS, VOCAB], tl.float32)
    for step in tl.range(0, width, HIDDEN):
        left = _load(hidden, first_row, step, num_rows, width, hidden_stride, DESCRIPTORS, WHOLE_STEPS, ROWS, HIDDEN)
        right = _load(
            weight, first_column, step, vocab_size, width, weight_stride, DESCRIPTORS, WHOLE_STEPS, VOCAB, HIDDEN
        )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        # not TF32, which would round float32 inputs to 10 bits of mantissa
        products = tl.dot(left, right.T, products, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["start"])
def _fused_tiles(
    hidden,
    weight,
    bias_ptr,
    targets_ptr,
    highest_ptr,
    total_ptr,
    moment_ptr,
    target_ptr,
    argmax_ptr,
    num_rows,
    vocab_size,
    width,
    hidden_stride,
    weight_stride,
    tiles_per_split,
    splits,
    start,
    softcap,
    inverse_temperature,
    IGNORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
):
    place = _place(tl.program_id(0), tl.cdiv(num_rows, ROWS), splits, GROUP)
    first_row = place[0] * ROWS
    split = place[1]
    rows = first_row + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    targets = tl.load(targets_ptr + rows, mask=row_inside, other=IGNORED)
    own_column = own_columns(targets, start, vocab_size, IGNORED)
    own = tl.where(targets == IGNORED, float("inf"), tl.full([ROWS], -float("inf"), tl.float32))
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    best = tl.zeros([ROWS], tl.int32)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(vocab_size, VOCAB))
    for tile in tl.range(first_tile, last_tile, flatten=FLAT):
        products = _products(
            hidden, weight, first_row, tile * VOCAB, num_rows, vocab_size, width, hidden_stride, weight_stride,
            DESCRIPTORS, WHOLE_STEPS, WIDEN, ROWS, VOCAB, HIDDEN,
        )  # fmt: skip
        columns = tile * VOCAB + tl.arange(0, VOCAB)
        column_inside = columns < vocab_size
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        logits = logits_of(products, bias, softcap, inverse_temperature, HAS_SOFTCAP)
        logits = tl.where(column_inside[None, :], logits, -float("inf"))
        is_own = columns[None, :] == own_column[:, None]
        # compared in every tile: the product is in registers alone, so it cannot be loaded afterwards
        own = tl.maximum(own, tl.max(tl.where(is_own, logits, -float("inf")), axis=1))
        highest, total, moment, best = join_tile(highest, total, moment, best, logits, columns)
    store_sums(
        highest_ptr,
        total_ptr,
        moment_ptr,
        target_ptr,
        argmax_ptr,
        split.to(tl.int64) * num_rows + rows,
        row_inside,
        highest,
        total,
        moment,
        own,
        best.to(tl.int64) + start,
    )
