"""The output matrix slab after slab: sums of a chunk of rows, and its gradients.

Slabs run over the vocabulary. `chunk_sums` is the forward pass of some rows; with `hold` it keeps each slab
as the epilogue's gradients take it, so that the backward needs no second product. `Gradients` takes the
gradients of slabs of logits and adds them to those of the hidden states, the matrix and the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_models.layers.fast_linear import linear, product_nt, product_tn
from rft_models.logprobs.backend import KernelEpilogue, add_product
from rft_models.logprobs.epilogue import Epilogue, RowTerms, Shape
from rft_models.logprobs.planned_device import traced
from rft_models.logprobs.row_statistics import RowSums, SlabSums, VocabularyShard, merge_rows

NARROW_ADDITIONS = 4
"""Up to here the sum of the chunks' dW is in the type of W: rounded a few times instead of once, which beside the
error of the products themselves is little, and costs neither a float32 copy of W nor the time to fill it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """W and b, or a shard of their rows, in slabs of `slab` vocabulary entries."""

    weight_VD: Tensor
    bias_V: Tensor | None
    slab: int
    shard: VocabularyShard | None = None

    @property
    def offset(self) -> int:
        """The id of the first row."""
        return 0 if self.shard is None else self.shard.offset

    def starts(self) -> list[tuple[int, int, int]]:
        """(number, first row, end) of each slab, rows counted from 0."""
        num_rows = self.weight_VD.shape[0]
        starts = enumerate(range(0, num_rows, self.slab))
        return [(number, start, min(start + self.slab, num_rows)) for number, start in starts]

    def products(self, hidden_RD: Tensor, start: int, stop: int) -> Tensor:
        """[R, C] = h W^T + b of a slab, in the type of the hidden states."""
        bias_C = None if self.bias_V is None else self.bias_V[start:stop]
        return linear(hidden_RD, self.weight_VD[start:stop], bias_C)


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Flags of the outputs that the sums of a chunk compute."""

    moment: bool
    argmax: bool = False
    top_k: int = 0
    hold: bool = False


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """Some rows over all slabs of a matrix."""

    rows: SlabSums
    log_masses_SR: Tensor
    """[S, R] log sum of exp z over each slab."""
    held_SRC: list[Tensor]
    """S times [R, C] as the epilogue holds them; empty unless requested."""
    top: tuple[Tensor, Tensor] | None
    """([R, k] highest logits, [R, k] ids), highest first."""


def chunk_sums(
    matrix: Matrix, hidden_RD: Tensor, targets_R: Tensor, shape: Shape, epilogue: Epilogue, flags: OutputFlags
) -> ChunkSums:
    """Compute the sums of `hidden_RD` over the rows of `matrix`."""
    per_slab = {"moment": flags.moment, "argmax": flags.argmax}
    if isinstance(epilogue, KernelEpilogue) and not (flags.hold or flags.top_k) and epilogue.fuses(hidden_RD):
        arguments = (hidden_RD, matrix.weight_VD, matrix.bias_V, targets_R, matrix.offset, shape)
        parts = epilogue.fused_sums(*arguments, **per_slab)
        return ChunkSums(merge_rows(parts), _table(matrix, hidden_RD, flags).total, [], None)  # kernels use no masses
    table = _table(matrix, hidden_RD, flags)  # before the slabs: no small tensor may stay between the large ones
    held_SRC: list[Tensor] = []
    top = _no_entries(hidden_RD) if flags.top_k else None
    for number, start, stop in matrix.starts() if flags.hold else traced(matrix.starts()):
        products_RC = matrix.products(hidden_RD, start, stop)
        if top is not None:
            # before `sums`, which uses the products up
            top = _higher(top, products_RC, matrix.offset + start, flags.top_k)
        sums, held_RC = epilogue.sums(products_RC, targets_R, matrix.offset + start, shape, **per_slab)
        _write(table, number, sums)
        if flags.hold and held_RC.dtype is products_RC.dtype and held_RC is not products_RC:
            held_RC = products_RC.copy_(held_RC)  # the later block is the one to free: no hole stays between slabs
        if flags.hold:
            held_SRC.append(held_RC)
        del products_RC, held_RC, sums
    return ChunkSums(merge_rows(table), table.highest + table.total.log(), held_SRC, _shaped(top, shape))


def _table(matrix: Matrix, hidden_RD: Tensor, flags: OutputFlags) -> SlabSums:
    """[S, R] sums without entries, one row of them a slab, and one for a matrix without rows.

    Made before the slabs, so that no small tensor of one slab stays behind the large ones of the next: the
    allocator would find no place for those again and take new memory for each slab.
    """
    size = (max(1, len(range(0, matrix.weight_VD.shape[0], matrix.slab))), hidden_RD.shape[0])
    zeros_SR = hidden_RD.new_zeros(size, dtype=sum_dtype(hidden_RD))
    ids_SR = torch.zeros_like(zeros_SR, dtype=torch.int64) if flags.argmax else None
    moment_SR = zeros_SR.clone() if flags.moment else None
    return SlabSums(zeros_SR - torch.inf, zeros_SR, moment_SR, zeros_SR - torch.inf, ids_SR)


def _write(table: SlabSums, number: int, sums: SlabSums) -> None:
    for rows_SR, values_R in zip(table, sums, strict=True):
        if rows_SR is not None and values_R is not None:
            rows_SR[number] = values_R


def _no_entries(hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
    values = hidden_RD.new_empty((hidden_RD.shape[0], 0), dtype=sum_dtype(hidden_RD))
    return values, torch.empty_like(values, dtype=torch.int64)


def _higher(top: tuple[Tensor, Tensor], products_RC: Tensor, start: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Select the k highest of those so far and a slab; softcap and temperature keep the order."""
    values, ids = products_RC.topk(min(top_k, products_RC.shape[1]), 1)
    values, ids = torch.cat((top[0], values.to(top[0].dtype)), 1), torch.cat((top[1], ids + start), 1)
    values, indices = values.topk(min(top_k, values.shape[1]), 1)
    return values, ids.gather(1, indices)


def _shaped(top: tuple[Tensor, Tensor] | None, shape: Shape) -> tuple[Tensor, Tensor] | None:
    if top is None:
        return None
    values = top[0] if shape.softcap is None else shape.softcap * torch.tanh(top[0] / shape.softcap)
    return values / shape.temperature, top[1]


def log_shares(sums: ChunkSums, rows: RowSums) -> Tensor:
    """[S, R] log of the probability of each slab."""
    return (sums.log_masses_SR - rows.highest) - rows.log_total


class Gradients:
    """Sums of the gradients of the matrix and the bias; those of hidden states are the caller's, chunk by chunk.

    Up to `NARROW_ADDITIONS` chunks are added in the type of W, each sum rounded as a product of the whole is; with
    more the gradient is float32 until `weight` is read.
    """

    def __init__(self, matrix: Matrix, *, needs_weight: bool, needs_bias: bool, num_additions: int) -> None:
        weight_VD, bias_V = matrix.weight_VD, matrix.bias_V
        wide = sum_dtype(weight_VD)
        self._matrix = matrix
        self._num_additions = num_additions
        self._weight_VD: Tensor | None = None
        self._bias_V: Tensor | None = None
        if needs_weight:
            # few roundings cost little; more than that are summed in float32
            kind = weight_VD.dtype if num_additions <= NARROW_ADDITIONS else wide
            # without rows no product will overwrite the tensor
            make = torch.zeros_like if num_additions == 0 else torch.empty_like
            self._weight_VD = make(weight_VD, dtype=kind)
        if needs_bias and bias_V is not None:
            self._bias_V = torch.zeros_like(bias_V, dtype=wide)

    def add(self, slopes_NC: Tensor, hidden_ND: Tensor, start: int, stop: int, *, first: bool) -> None:
        """dW[slab] += dz^T h and db[slab] += sum of dz; `first` overwrites."""
        if self._bias_V is not None:
            self._bias_V[start:stop] += slopes_NC.sum(0, dtype=self._bias_V.dtype)
        if self._weight_VD is None:
            return
        if self._num_additions == 1 and stop - start == self._weight_VD.shape[0]:
            # the only product is the whole gradient: it takes the place of the empty tensor and is not copied into it
            self._weight_VD = product_tn(slopes_NC, hidden_ND)
            return
        slab_CD = self._weight_VD[start:stop]
        if first and slab_CD.dtype is slopes_NC.dtype:
            product_tn(slopes_NC, hidden_ND, out_NK=slab_CD)
        elif first:
            slab_CD.copy_(product_tn(slopes_NC, hidden_ND))
        elif not add_product(slab_CD, slopes_NC.t(), hidden_ND):
            slab_CD += product_tn(slopes_NC, hidden_ND)

    def weight(self) -> Tensor | None:
        """[V, D] in the type of W, or None where it is not needed; may be called once."""
        weight_VD, self._weight_VD = self._weight_VD, None
        return None if weight_VD is None else weight_VD.to(self._matrix.weight_VD.dtype)

    def bias(self) -> Tensor | None:
        """[V] in the type of b, or None."""
        return (
            None if self._bias_V is None or self._matrix.bias_V is None else self._bias_V.to(self._matrix.bias_V.dtype)
        )


def add_hidden(sum_ND: Tensor, slopes_NC: Tensor, weight_CD: Tensor) -> None:
    """dX += dz W of a slab, in float32."""
    if not add_product(sum_ND, slopes_NC, weight_CD):
        sum_ND += product_nt(slopes_NC, weight_CD.t())


def sum_dtype(like: Tensor) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64."""
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def row_terms(sums: RowSums, targets_R: Tensor, grad_R: Tensor, entropy_grad_R: Tensor | None) -> RowTerms:
    """Collect the terms of each row that the gradients of the slabs need."""
    return RowTerms(targets_R, sums.logprobs, sums.highest, sums.log_total, sums.entropy, grad_R, entropy_grad_R)
