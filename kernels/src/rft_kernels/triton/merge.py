"""Triton kernel that merges the numbers of a row's parts: slabs, splits of a kernel's grid, shards of ranks.

Parts are added in the order of their number, relative to the row's highest logit, so equal inputs give
equal bits. Equations are in `reference_slabs`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from rft_kernels.row_statistics import RowSums, SlabSums, num_parts, stacked
from rft_kernels.triton.tile_loads import store_sums

_ROWS = 128


def join_sums(parts: SlabSums | list[SlabSums]) -> SlabSums:
    """Same meaning, arguments and results as `reference_slabs.join_sums`."""
    return _merged(parts)[0]


def merge_sums(parts: SlabSums | list[SlabSums]) -> RowSums:
    """Same meaning, arguments and results as `reference_slabs.merge_sums`."""
    return _merged(parts)[1]


def empty_sums(shape: tuple[int, ...], device: torch.device) -> SlabSums:
    """Room for the five numbers, [..., R] each."""
    numbers = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4))
    return SlabSums(*numbers, argmax=torch.empty(shape, dtype=torch.int64, device=device))


def _merged(parts: SlabSums | list[SlabSums]) -> tuple[SlabSums, RowSums]:
    parts_SR = SlabSums(*(tensor.contiguous() for tensor in stacked(parts)))
    num_splits, num_rows = parts_SR.highest.shape
    assert num_splits * num_rows < 2**31, f"{num_splits} parts of {num_rows} rows are beyond a 32-bit offset"
    device = parts_SR.highest.device
    joined = empty_sums((num_rows,), device)
    normalizer_R, logprob_R, entropy_R = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3))
    if num_rows > 0:
        kernel = cast(Any, _merge_rows)
        with torch.cuda.device_of(normalizer_R):
            kernel[(num_parts(num_rows, _ROWS),)](
                *parts_SR, *joined, normalizer_R, logprob_R, entropy_R, num_splits, num_rows, ROWS=_ROWS
            )
    return joined, RowSums(normalizer_R, logprob_R, entropy_R, joined.argmax)


@triton.jit
def _merge_rows(
    parts_highest_ptr,
    parts_total_ptr,
    parts_moment_ptr,
    parts_target_ptr,
    parts_argmax_ptr,
    highest_ptr,
    total_ptr,
    moment_ptr,
    target_ptr,
    argmax_ptr,
    normalizer_ptr,
    logprob_ptr,
    entropy_ptr,
    num_splits,
    num_rows,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    own = tl.full([ROWS], -float("inf"), tl.float32)
    best = tl.load(parts_argmax_ptr + rows, mask=inside, other=0)
    for split in range(num_splits):
        offsets = split * num_rows + rows
        part = tl.load(parts_highest_ptr + offsets, mask=inside, other=0.0)
        part_best = tl.load(parts_argmax_ptr + offsets, mask=inside, other=0)
        best = tl.where((part > highest) | ((part == highest) & (part_best < best)), part_best, best)
        highest = tl.maximum(highest, part)
        own = tl.maximum(own, tl.load(parts_target_ptr + offsets, mask=inside, other=-float("inf")))
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    # a second pass, when the highest logit of the row is known: each part is moved to it once
    for split in range(num_splits):
        offsets = split * num_rows + rows
        # 0 and not -inf for rows that are not there: -inf - -inf would be NaN
        part = tl.load(parts_highest_ptr + offsets, mask=inside, other=0.0)
        part_total = tl.load(parts_total_ptr + offsets, mask=inside, other=0.0)
        part_moment = tl.load(parts_moment_ptr + offsets, mask=inside, other=0.0)
        moved = tl.where(part == -float("inf"), 0.0, part - highest)  # such a part has total and moment 0
        shrink = tl.exp(moved)
        total += part_total * shrink
        moment += (part_moment + part_total * moved) * shrink
    store_sums(
        highest_ptr,
        total_ptr,
        moment_ptr,
        target_ptr,
        argmax_ptr,
        rows,
        inside,
        highest,
        total,
        moment,
        own,
        best,
    )
    total = tl.where(inside, total, 1.0)  # of rows that are not there nothing is kept
    log_total = tl.log(total)
    tl.store(normalizer_ptr + rows, highest + log_total, mask=inside)
    tl.store(logprob_ptr + rows, tl.where(own == float("inf"), 0.0, (own - highest) - log_total), mask=inside)
    tl.store(entropy_ptr + rows, log_total - moment / total, mask=inside)
