"""Recurrences that run backwards over packed tokens: each token needs what its sequence's later tokens got.

`reverse_scan` is the recurrence. The others lay the tokens that the policy sampled one next to
the other for it (the L loss tokens, [L]) and put results back: a token that is not sampled is no
step of the decision process, and what stands there reaches nothing.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.packed.packed_ids import known_runs
from rft_algos.packed.segments import all_true
from rft_algos.packed.tensor_checks import check_mask, check_vectors

_BLOCK = 64
"""Steps of a loop over time; each is one vector operation over all blocks of a chunk."""
_CHUNK = 524_288
"""Elements that are scanned together. Working memory stays small: on a CPU fresh pages cost more than the sums."""


def reverse_scan(values_T: Tensor, coefficients_T: Tensor) -> Tensor:
    """Linear recurrence from the last element to the first.

    y_t = x_t + c_t y_{t+1}, with y_T = 0 beyond the end.

    A coefficient of 0 cuts the recurrence, so sequences that lie one after another need one call.
    The elements are cut into blocks of equal length. All blocks are run at once from a carry of 0,
    keeping only what leaves each block and the product of its coefficients; the carries that
    enter the blocks are the same recurrence over blocks; then all blocks are run once more from
    their carries. That is 2 T multiplications in vectors instead of T dependent ones. Each
    result differs from that of the plain loop by rounding only. A value that is not finite spoils
    all results before it, across coefficients of 0 as well (0 * NaN is NaN).

    Source: Blelloch 1990, "Prefix sums and their applications" (CMU-CS-90-190), section 1.4.

    Args:
        values_T: [T] x, float32 or float64.
        coefficients_T: [T] c of the same type, of magnitude at most 1 (products of larger ones may
            overflow where the loop would not).

    Returns:
        [T] y in the type of `values_T`, no gradient. Example: values 1, 2, 4 with coefficients
        0.5 give 1 + 0.5 (2 + 0.5 * 4) = 3, 4, 4.
    """
    return reverse_scan_(values_T.detach().clone(), coefficients_T)


def reverse_scan_(values_T: Tensor, coefficients_T: Tensor) -> Tensor:
    """`reverse_scan` in place: the values are overwritten with the results.

    Args:
        values_T: [T] x, float32 or float64, without gradient; becomes y.
        coefficients_T: [T] c of the same type.

    Returns:
        [T] `values_T` itself.
    """
    if values_T.ndim != 1:
        refuse(f"values_T must be a vector: {values_T.shape}")
    if values_T.shape != coefficients_T.shape:
        refuse(f"{values_T.shape} values, {coefficients_T.shape} coefficients")
    if values_T.dtype != coefficients_T.dtype:
        refuse(f"{values_T.dtype} values, {coefficients_T.dtype} coefficients")
    coefficients_T = coefficients_T.detach()
    carry_1 = values_T.new_zeros(1)
    for end in range(values_T.shape[0], 0, -_CHUNK):
        start = max(end - _CHUNK, 0)
        _scan(values_T[start:end], coefficients_T[start:end], carry_1)
        # the first result of this chunk enters the chunk before it
        carry_1 = values_T[start : start + 1]
    return values_T


def loss_positions(loss_mask_T: Tensor) -> Tensor | None:
    """Return the positions of the L loss tokens.

    Args:
        loss_mask_T: [T] bool, true at tokens that the policy sampled.

    Returns:
        [L] int64 in ascending order; None where all tokens are loss tokens.
    """
    check_mask(loss_mask_T=loss_mask_T)
    check_vectors(loss_mask_T=loss_mask_T)
    return None if all_true(loss_mask_T) else loss_mask_T.nonzero().squeeze(1)


def gather_loss_tokens(values_T: Tensor, positions_L: Tensor | None) -> Tensor:
    """The values of the loss tokens.

    Args:
        values_T: [T] values, of any type.
        positions_L: [L] from `loss_positions`.

    Returns:
        [L] float64 in memory of its own, no gradient.
    """
    if positions_L is None:
        return values_T.detach().to(torch.float64, copy=True)
    return values_T.detach().index_select(0, positions_L).to(torch.float64)


def scatter_loss_tokens(values_L: Tensor, positions_L: Tensor | None, num_tokens: int) -> Tensor:
    """The inverse of `gather_loss_tokens`: values at their tokens, 0 elsewhere.

    Args:
        values_L: [L] values.
        positions_L: [L] from `loss_positions`.
        num_tokens: T.

    Returns:
        [T] values; may share memory with `values_L`.
    """
    if positions_L is None:
        return values_L
    return values_L.new_zeros(num_tokens).index_copy_(0, positions_L, values_L)


def last_positions(segment_ids_T: Tensor, positions_L: Tensor | None) -> Tensor:
    """Return the position of the last loss token of each sequence.

    Args:
        segment_ids_T: [T] int64, the sequence of each token; the tokens of one are contiguous.
        positions_L: [L] from `loss_positions`.

    Returns:
        [I] int64 in ascending order, one for each sequence that has a loss token.
    """
    known = known_runs(segment_ids_T) if positions_L is None else None
    if known is not None:
        return known.lengths_R.cumsum(0) - 1
    ids_L = segment_ids_T if positions_L is None else segment_ids_T.index_select(0, positions_L)
    lengths_I = cast(Tensor, ids_L.unique_consecutive(return_counts=True)[1])  # pyright: ignore
    ends_I = lengths_I.cumsum(0) - 1
    return ends_I if positions_L is None else positions_L[ends_I]


def same_sequence(segment_ids_T: Tensor, positions_L: Tensor | None) -> Tensor:
    """Mask the loss tokens that are followed by another one of their sequence.

    Args:
        segment_ids_T: [T] int64, the sequence of each token; the tokens of one are contiguous.
        positions_L: [L] from `loss_positions`.

    Returns:
        [L] bool, false at the last loss token of each sequence.
    """
    known = known_runs(segment_ids_T) if positions_L is None else None
    if known is not None:
        # every token but the last of its run
        return torch.ones_like(segment_ids_T, dtype=torch.bool).index_fill_(0, known.lengths_R.cumsum(0) - 1, False)
    ids_L = segment_ids_T if positions_L is None else segment_ids_T.index_select(0, positions_L)
    continues_L = torch.zeros_like(ids_L, dtype=torch.bool)
    continues_L[:-1] = ids_L[1:] == ids_L[:-1]
    return continues_L


def _scan(values_T: Tensor, coefficients_T: Tensor, carry_1: Tensor) -> None:
    """The recurrence with y_T = carry, in place."""
    num_blocks, num_left = divmod(values_T.shape[0], _BLOCK)
    whole = values_T.shape[0] - num_left
    # the last few elements first, as one short column: what leaves them enters the last block
    if num_left:
        _run_blocks(values_T[whole:].unsqueeze(1), coefficients_T[whole:].unsqueeze(1), carry_1)
        carry_1 = values_T[whole : whole + 1]
    if not num_blocks:
        return

    # time down the rows, blocks along the columns: every step of the two loops reads one contiguous row
    values_MB = values_T[:whole].view(num_blocks, _BLOCK)
    values_BM = values_MB.t().contiguous()
    coefficients_BM = coefficients_T[:whole].view(num_blocks, _BLOCK).t().contiguous()
    starts_M, products_M = _summarise_blocks(values_BM, coefficients_BM)
    # what leaves a block follows the same recurrence, over 64 times fewer elements
    _scan(starts_M, products_M, carry_1)
    # what enters a block is what leaves the block after it
    _run_blocks(values_BM, coefficients_BM, torch.cat([starts_M[1:], carry_1]))
    values_MB.copy_(values_BM.t())


def _summarise_blocks(values_BM: Tensor, coefficients_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what leaves each block when 0 enters it, and the factor by which it multiplies its input."""
    sums_M = values_BM[-1].clone()
    products_M = coefficients_BM[-1].clone()
    for index in reversed(range(values_BM.shape[0] - 1)):
        torch.addcmul(values_BM[index], coefficients_BM[index], sums_M, out=sums_M)
        products_M *= coefficients_BM[index]
    return sums_M, products_M


def _run_blocks(values_BM: Tensor, coefficients_BM: Tensor, carries_M: Tensor) -> None:
    """Runs every block from what enters it, in place."""
    for index in reversed(range(values_BM.shape[0])):
        carries_M = torch.addcmul(values_BM[index], coefficients_BM[index], carries_M, out=values_BM[index])
