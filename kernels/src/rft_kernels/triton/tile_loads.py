"""Operations on a tile of products in registers: logits of them, and sums joined to a row's running sums.

Columns beyond the slab are -inf before anything is summed, and a running maximum starts at -inf: a
padded column read as 0, or a maximum that starts at 0, would win over logits that are all far below 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FAR_BELOW = tl.constexpr(-200.0)
"""exp of this is 0 in float32; a floor at it keeps (z - z*) exp(z - z*) at 0 for z = -inf, where it were NaN."""
_NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def tanh(x):
    """tanh of float32, to 1e-7 absolutely, without overflow: the exponential is of a negative number."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def logits_of(products, bias, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
    """z = softcap(product + bias) / temperature in float32; the forward and backward kernels share its rounding."""
    logits = products.to(tl.float32) + bias
    if HAS_SOFTCAP:
        logits = softcap * tanh(logits / softcap)
    return logits * inverse_temperature


@triton.jit
def own_columns(targets, start, num_columns, IGNORED: tl.constexpr):
    """int32 column of each row's target in a slab from `start` on, -1 where it does not hold it."""
    columns = targets - start
    in_slab = (columns >= 0) & (columns < num_columns) & (targets != IGNORED)
    return tl.where(in_slab, columns, -1).to(tl.int32)


@triton.jit
def join_tile(highest, total, moment, best, logits, columns):
    """The running sums of rows with those of a tile joined.

    Args:
        highest: [R] running maximum, -inf before the first tile.
        total: [R] sum of exp(z - highest).
        moment: [R] sum of (z - highest) exp(z - highest).
        best: [R] column of the maximum, the lowest on ties.
        logits: [R, C] float32, -inf beyond the slab.
        columns: [C] int32, above all those of earlier tiles.

    Returns:
        highest, total, moment and best with the tile counted.
    """
    tile_highest = tl.max(logits, axis=1)
    tile_best = tl.min(tl.where(logits == tile_highest[:, None], columns[None, :], _NO_COLUMN), axis=1)
    best = tl.where(tile_highest > highest, tile_best, best)
    now_highest = tl.maximum(highest, tile_highest)
    # while every logit so far is -inf there is nothing to be relative to, and -inf - -inf is NaN
    base = tl.where(now_highest == -float("inf"), 0.0, now_highest)
    moved = tl.where(highest == -float("inf"), 0.0, highest - base)
    shrink = tl.exp(moved)
    # NaN must pass the floor: a maximum that drops it would hide a broken logit
    relative = tl.maximum(logits - base[:, None], _FAR_BELOW, propagate_nan=tl.PropagateNan.ALL)
    mass = tl.exp(relative)
    moment = (moment + total * moved) * shrink + tl.sum(relative * mass, axis=1)
    total = total * shrink + tl.sum(mass, axis=1)
    return now_highest, total, moment, best


@triton.jit
def store_sums(
    highest_ptr, total_ptr, moment_ptr, target_ptr, argmax_ptr, offsets, inside, highest, total, moment, target, argmax
):
    """Write the five numbers of each row at `offsets`."""
    tl.store(highest_ptr + offsets, highest, mask=inside)
    tl.store(total_ptr + offsets, total, mask=inside)
    tl.store(moment_ptr + offsets, moment, mask=inside)
    tl.store(target_ptr + offsets, target, mask=inside)
    tl.store(argmax_ptr + offsets, argmax, mask=inside)
