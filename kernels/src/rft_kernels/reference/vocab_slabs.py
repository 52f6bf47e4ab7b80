"""Torch references of the operations on slabs of the vocabulary, and of the one that forms the products itself.

    z_v = softcap(h . W_v + b_v) / temperature, softcap(x) = c tanh(x / c)
    log p(y) = z_y - log sum_v exp z_v        H = log sum_v exp z_v - sum_v p_v z_v

A slab is some columns start .. start + C of the vocabulary. The backward pass forms its products again:

    dz_v = g (1[v = y] - p_v) - g_H p_v (log p_v + H)        d product_v = dz_v (1 - tanh^2) / temperature

with g and g_H the gradients of the loss by the row's log-probability and entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_kernels.row_statistics import IGNORED, RowSums, SlabSums, num_parts, stacked

_SPLIT = 16384


def slab_sums(
    products_RC: Tensor,
    targets_R: Tensor,
    start: int,
    *,
    temperature: float,
    softcap: float | None = None,
    bias_C: Tensor | None = None,
) -> SlabSums:
    """The five numbers of each row, see `SlabSums`, of one slab.

    Args:
        products_RC: [R, C] products h W^T of vocabulary entries start .. start + C, any floating type; -inf
            forbids a token.
        targets_R: [R] int64 ids in the whole vocabulary, or `IGNORED`.
        start: id of the slab's first entry; with a vocabulary sharded over ranks, in the whole vocabulary.
        temperature: positive divisor of the logits.
        softcap: c of c tanh(x / c), applied before the temperature, or None.
        bias_C: [C] of these entries, added to the products, or None.
    """
    logits_RC = _logits(products_RC, temperature, softcap, bias_C)
    highest_R = logits_RC.amax(1)
    best_R = (logits_RC == highest_R[:, None]).int().argmax(1)  # max promises no particular one of equals
    relative_RC = logits_RC - _base(highest_R)[:, None]
    mass_RC = relative_RC.exp()
    moment_R = (_finite(relative_RC) * mass_RC).sum(1)
    inside_R, column_R1 = _own_column(targets_R, start, logits_RC.shape[1])
    target_R = torch.where(inside_R, logits_RC.gather(1, column_R1)[:, 0], -torch.inf)
    # after the line above, which made -inf of it: +inf must win the maximum over parts
    target_R = target_R.masked_fill(targets_R == IGNORED, torch.inf)
    return SlabSums(highest_R, mass_RC.sum(1), moment_R, target_R, best_R + start)


def join_sums(parts: SlabSums | list[SlabSums]) -> SlabSums:
    """The five numbers [R] of several parts together, which may be joined again: with those of other ranks.

    Args:
        parts: [S, R] tensors, or S parts of [R]. Parts are added in their order.
    """
    parts_SR = stacked(parts)
    highest_R = parts_SR.highest.amax(0)
    moved_SR = parts_SR.highest - _base(highest_R)
    shrink_SR, moved_SR = moved_SR.exp(), _finite(moved_SR)
    unbeaten_SR = parts_SR.highest == highest_R
    highest_id = torch.iinfo(torch.int64).max
    return SlabSums(
        highest_R,
        (parts_SR.total * shrink_SR).sum(0),
        ((parts_SR.moment + parts_SR.total * moved_SR) * shrink_SR).sum(0),
        parts_SR.target.amax(0),
        # the lowest id of the parts that share the highest logit, in whatever order the parts come
        parts_SR.argmax.masked_fill(~unbeaten_SR, highest_id).amin(0),
    )


def merge_sums(parts: SlabSums | list[SlabSums]) -> RowSums:
    """Compute `RowSums` of each row from parts that cover the whole vocabulary.

    Args:
        parts: [S, R] tensors, or S parts of [R], or one.
    """
    joined = join_sums(parts)
    log_total_R = joined.total.log()
    # not target - normalizer: of two large numbers the small difference is taken first, and keeps its digits
    logprob_R = (joined.target - joined.highest) - log_total_R
    return RowSums(
        joined.highest + log_total_R,
        logprob_R.masked_fill(joined.target == torch.inf, 0.0),
        log_total_R - joined.moment / joined.total,
        joined.argmax,
    )


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
    """Gradient of the loss by the products (and by the bias, summed over rows), written in their place.

    Rows whose target is `IGNORED` get 0, by their entropy as well.

    Args:
        products_RC: as in `slab_sums`; overwritten.
        targets_R: as in `slab_sums`.
        start: as in `slab_sums`.
        normalizer_R: [R] log-sum-exp over the whole vocabulary, from `merge_sums`.
        entropy_R: [R] from `merge_sums`.
        grad_R: [R] gradient of the loss by each row's log-probability.
        entropy_grad_R: [R] by each row's entropy, or None for 0.
        temperature: as in `slab_sums`.
        softcap: as in `slab_sums`.
        bias_C: as in `slab_sums`.

    Returns:
        `products_RC`.
    """
    logits_RC = _logits(products_RC, temperature, softcap, bias_C)
    log_probs_RC = logits_RC - normalizer_R[:, None]
    slope_RC = grad_R[:, None].expand_as(logits_RC)
    if entropy_grad_R is not None:
        # not in place: until here it is a view of one column
        slope_RC = slope_RC + entropy_grad_R[:, None] * (_finite(log_probs_RC) + entropy_R[:, None])
    gradient_RC = -log_probs_RC.exp() * slope_RC
    inside_R, column_R1 = _own_column(targets_R, start, logits_RC.shape[1])
    # a row whose target is in another slab adds 0 to column 0
    gradient_RC.scatter_add_(1, column_R1, (grad_R.to(gradient_RC.dtype) * inside_R)[:, None])
    if softcap is not None:
        # tanh is read back from the logit, which is c tanh / temperature, so the product is not needed again
        gradient_RC *= 1 - (logits_RC * (temperature / softcap)).square()
    gradient_RC = (gradient_RC / temperature).masked_fill((targets_R == IGNORED)[:, None], 0.0)
    return products_RC.copy_(gradient_RC)


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
) -> SlabSums:
    """The five numbers of each row from hidden states and the output matrix, no [R, V] tensor made on a GPU.

    Products are summed and kept in float32 (float64 for float64 inputs), never rounded to the inputs' type.

    Args:
        hidden_RD: [R, D] hidden states.
        weight_VD: [V, D] output matrix, of the same type.
        targets_R: as in `slab_sums`.
        temperature: as in `slab_sums`.
        softcap: as in `slab_sums`.
        bias_V: [V] or None.
        start: id of the matrix's first row in the whole vocabulary: 0 unless it is a shard.
        splits: into how many parts the vocabulary is cut, at most; None picks.

    Returns:
        `SlabSums` of [S, R] for `merge_sums`, S at most `splits`.
    """
    vocab_size = weight_VD.shape[0]
    width = num_parts(vocab_size, splits or num_parts(vocab_size, _SPLIT))
    # converted before the product, so that sums are those of the kernel: never rounded to the inputs' type
    hidden_RD = hidden_RD.to(_sum_dtype(hidden_RD))
    parts = []
    for first in range(0, vocab_size, width):
        products_RC = hidden_RD @ weight_VD[first : first + width].to(hidden_RD.dtype).t()
        bias_C = None if bias_V is None else bias_V[first : first + width]
        cut = slab_sums(products_RC, targets_R, start + first, temperature=temperature, softcap=softcap, bias_C=bias_C)
        parts.append(cut)
    return stacked(parts)


def _logits(products_RC: Tensor, temperature: float, softcap: float | None, bias_C: Tensor | None) -> Tensor:
    assert temperature > 0, f"temperature must be positive, it is {temperature}"
    logits_RC = products_RC.to(_sum_dtype(products_RC))
    if bias_C is not None:
        logits_RC = logits_RC + bias_C.to(logits_RC.dtype)
    if softcap is not None:
        logits_RC = softcap * torch.tanh(logits_RC / softcap)
    return logits_RC if temperature == 1.0 else logits_RC / temperature


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _base(highest: Tensor) -> Tensor:
    """Return the base that logits are measured from: 0 where all are -inf, for -inf - -inf is NaN."""
    return highest.masked_fill(highest == -torch.inf, 0.0)


def _finite(relative: Tensor) -> Tensor:
    """0 for -inf: x exp(x) is 0 there, and -inf * 0 would be NaN."""
    return relative.masked_fill(relative == -torch.inf, 0.0)


def _own_column(targets_R: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """([R] bool: the target lies in the slab; [R, 1] its column, 0 where it does not)."""
    inside_R = (targets_R >= start) & (targets_R < start + width) & (targets_R != IGNORED)
    return inside_R, torch.where(inside_R, targets_R - start, 0)[:, None]
