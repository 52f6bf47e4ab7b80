"""Hidden states and the output matrix -> log-probabilities, without a [tokens, vocabulary] matrix alive.

    z_v = softcap(h . W_v + b_v) / temperature        log p(y) = z_y - log sum_v exp z_v
    H = log sum_v exp z_v - sum_v p_v z_v

The log-sum-exp is float32 (float64 for float64 inputs) and runs over slabs of the vocabulary with
a running maximum, so one slab of logits is alive at a time. The upstream gradient g of each row is
not known in the forward pass, so the backward pass forms each slab again:

    dz_v = g (1[v = y] - p_v) - g_H p_v (log p_v + H)

Slabs run over the vocabulary and not over the rows because each slice of the weight gradient is
then written once, instead of one [V, D] accumulation per chunk of rows (2048 x 512 x 32000 on a
CPU: 0.61 of the time in bfloat16, 0.84 in float32). Where the logits of the rows are small enough
they stay in memory, which saves the second product: 3 products instead of 4 (on one CPU thread 0.64
of the time at 512 x 256 x 32000, 0.83 to 0.88 of the CPU time at 2048 x 512 x 32000; `chunk_size`
asks for none to be kept). Rows whose upstream gradient is zero (clipped, masked, groups without
advantage) are left out of the backward. `rft_models.logprobs.fused_loss` needs 3 products at any
size, for objectives whose gradient follows from the row's own log-probability.

With a vocabulary sharded over ranks each rank has the same rows and its own rows of W: a few numbers a
row are merged, and the gradient of the hidden states is summed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_models.logprobs.backend import EpilogueName, choose_epilogue
from rft_models.logprobs.epilogue import Epilogue, RowTerms, Shape
from rft_models.logprobs.planned_device import device_type, traced
from rft_models.logprobs.row_statistics import (
    IGNORED,
    RowSums,
    VocabularyShard,
    merge_slabs,
    merged_over_ranks,
    to_logprobs,
    top_k_over_ranks,
)
from rft_models.logprobs.vocab_slabs import (
    ChunkSums,
    Gradients,
    Matrix,
    OutputFlags,
    add_hidden,
    chunk_sums,
    sum_dtype,
)

KEPT_LOGITS = 67_108_864
"""Logits or probabilities up to this many elements (256 MiB in float32) are kept for the backward pass: a third of what
`log_softmax` and its backward hold."""

_SLAB_ELEMENTS = 2_097_152
"""Size of a slab: 8 MiB in float32 stay in a shared last-level cache between the passes over them, and
come from memory that is in use already (fresh pages cost ten times a pass: 65 MiB take 27 ms to touch)."""

_CUDA_SLAB_ELEMENTS = 67_108_864
"""128 MiB in bfloat16: from 64 MiB on the starts of products are lost in their length."""

_MIN_SLAB = 256


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """Outputs of the head, [R] each; float32, or float64 for float64 inputs."""

    logprobs: Tensor
    """Natural logarithm of the target's probability; 0 for ignored targets."""
    entropy: Tensor | None
    """In nats, of every row; None unless requested."""
    argmax: Tensor | None
    """int64 id of the most probable entry; None unless requested."""
    top_logprobs: Tensor | None
    """[R, k], highest first, no gradient; None unless requested."""
    top_ids: Tensor | None
    """[R, k] int64."""


def linear_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    slab_size: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    shard: VocabularyShard | None = None,
    epilogue: EpilogueName | None = None,
    all_counted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return ([R] log-probabilities, [R] entropies or None) of `linear_outputs`; the arguments are the same."""
    outputs = linear_outputs(
        hidden_RD,
        weight_VD,
        targets_R,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        chunk_size=chunk_size,
        slab_size=slab_size,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
        shard=shard,
        epilogue=epilogue,
        all_counted=all_counted,
    )
    return outputs.logprobs, outputs.entropy


def linear_outputs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    slab_size: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    with_argmax: bool = False,
    top_k: int = 0,
    shard: VocabularyShard | None = None,
    epilogue: EpilogueName | None = None,
    all_counted: bool = False,
) -> HeadOutputs:
    """Compute log-probabilities of `targets_R` under softmax(softcap(h W^T + b) / temperature), and more on request.

    Args:
        hidden_RD: final hidden states, one row a predicted token.
        weight_VD: output matrix, or this rank's rows of it.
        targets_R: int64 token ids in [0, vocabulary), or `IGNORED` (-100): value 0 and no gradient.
        bias: [V] or None.
        temperature: positive divisor of the logits.
        softcap: c of z -> c tanh(z / c), applied before the temperature, or None.
        chunk_size: rows computed at a time, the logits never whole in memory; None picks by size
            (small logits are kept, large ones are cut along the vocabulary only).
        slab_size: vocabulary entries computed at a time; None picks by size.
        with_entropy: also the entropy of each row.
        entropy_gradient: let gradients flow through the entropy; without it the entropy is detached.
        with_argmax: also the most probable entry.
        top_k: also that many of the most probable entries with their log-probabilities.
        shard: where this rank's rows begin and how ranks meet; None where `weight_VD` is whole.
        epilogue: which code runs the passes over the logits; None picks, see `choose_epilogue`.
        all_counted: whether no target is `IGNORED`, so that nothing is counted, for which the host would wait.
    """
    hidden_RD, weight_VD, bias = of_one_type(hidden_RD, weight_VD, bias)
    options = _Options(with_entropy, with_entropy and entropy_gradient, with_argmax, top_k)
    # entropy, argmax and top-k are wanted of every row; log-probabilities alone only of rows with a target
    rows_N = None if with_entropy or with_argmax or top_k or all_counted else counted_rows(targets_R)
    if rows_N is not None:
        hidden_RD, targets_N = hidden_RD.index_select(0, rows_N), targets_R.index_select(0, rows_N)
    else:
        targets_N = targets_R
    shape = Shape(temperature, softcap)
    cut = _cut(hidden_RD, weight_VD, shape, chunk_size, slab_size, epilogue)
    matrix = Matrix(weight_VD, bias, cut.slab, shard)
    if needs_gradient(hidden_RD, weight_VD, bias):
        outputs = _outputs(_SlabLogprobs.apply(hidden_RD, weight_VD, bias, targets_N, matrix, cut, options), options)
    else:
        outputs = _all_sums(matrix, hidden_RD, targets_N, cut, options, hold=False).outputs(options)
    if rows_N is None:
        return outputs
    zeros_R = outputs.logprobs.new_zeros(targets_R.shape)
    return HeadOutputs(zeros_R.index_copy(0, rows_N, outputs.logprobs), None, None, None, None)


def slab_for(hidden_RD: Tensor, num_rows: int) -> int:
    """Vocabulary entries of a slab of `num_rows` rows: neither its logits nor its rows of dW above the limit."""
    elements = _CUDA_SLAB_ELEMENTS if device_type(hidden_RD) == "cuda" else _SLAB_ELEMENTS
    return max(_MIN_SLAB, elements // max(1, num_rows, hidden_RD.shape[1]))


@dataclass(frozen=True, slots=True)
class _Options:
    with_entropy: bool
    entropy_gradient: bool
    with_argmax: bool
    top_k: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """Shape of the logits, and the numbers of rows and vocabulary entries computed at a time."""

    shape: Shape
    chunk: int
    slab: int
    keep: bool
    """True where the slabs stay for the backward pass; then one chunk holds all rows."""
    epilogue: Epilogue


def _cut(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    shape: Shape,
    chunk_size: int | None,
    slab_size: int | None,
    epilogue: EpilogueName | None,
) -> _Cut:
    num_rows = hidden_RD.shape[0]
    chunk = max(1, num_rows if chunk_size is None else min(chunk_size, num_rows))
    slab = slab_for(hidden_RD, chunk) if slab_size is None else max(1, slab_size)
    num_logits = num_rows * weight_VD.shape[0]
    # a chunk size asks for little memory, so nothing is kept then, however few the logits
    keep = chunk_size is None and num_logits <= KEPT_LOGITS
    return _Cut(shape, chunk, slab, keep, choose_epilogue(hidden_RD, num_logits, shape, epilogue))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Results of the forward pass over all slabs."""

    rows: RowSums
    shares_SR: Tensor
    """[S, R] log of the probability of each slab; empty where no backward follows."""
    held_SRC: list[Tensor]
    top: tuple[Tensor, Tensor] | None

    def outputs(self, options: _Options) -> HeadOutputs:
        """Return the requested outputs, without a gradient."""
        return HeadOutputs(
            self.rows.logprobs,
            self.rows.entropy if options.with_entropy else None,
            self.rows.argmax,
            *(self.top or (None, None)),
        )


def _outputs(results: Any, options: _Options) -> HeadOutputs:
    logprobs_R, entropy_R, argmax_R, top_Rk, ids_Rk = results
    return HeadOutputs(logprobs_R, entropy_R if options.with_entropy else None, argmax_R, top_Rk, ids_Rk)


class _SlabLogprobs(torch.autograd.Function):
    """Slabs of the vocabulary, logits kept where they are few, else formed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_R: Tensor,
        matrix: Matrix,
        cut: _Cut,
        options: _Options,
    ) -> tuple[Tensor | None, ...]:
        sums = _all_sums(matrix, hidden_RD, targets_R, cut, options, hold=cut.keep)
        rows = sums.rows
        ctx.save_for_backward(
            *(hidden_RD, weight_VD, bias, targets_R, rows.logprobs, rows.highest, rows.log_total, rows.entropy),
            *(sums.shares_SR, *sums.held_SRC),
        )
        ctx.cut, ctx.shard, ctx.entropy_gradient = cut, matrix.shard, options.entropy_gradient
        results = (rows.logprobs, rows.entropy, rows.argmax, *(sums.top or (None, None)))
        differentiable = 2 if options.entropy_gradient else 1
        ctx.mark_non_differentiable(*(x for x in results[differentiable:] if x is not None))
        # an output that no loss uses then has None for its gradient, and no tensor of zeros is made
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias, targets_R, logprobs_R, highest_R, log_total_R, entropy_R, shares_SR, *kept = (
            ctx.saved_tensors
        )
        grad_R = torch.zeros_like(log_total_R) if grads[0] is None else grads[0]
        entropy_grad_R = grads[1] if ctx.entropy_gradient else None
        ignored_R = targets_R == IGNORED
        # the 0 of an ignored target is a constant: a gradient that arrives there must not reach the logits
        grad_R = grad_R.masked_fill(ignored_R, 0.0)
        has_gradient_R = grad_R != 0
        if entropy_grad_R is not None:
            entropy_grad_R = entropy_grad_R.masked_fill(ignored_R, 0.0)
            has_gradient_R |= entropy_grad_R != 0
        terms = RowTerms(targets_R, logprobs_R, highest_R, log_total_R, entropy_R, grad_R, entropy_grad_R)
        rows_N, hidden_ND = rows_with_gradient(has_gradient_R), hidden_RD
        if rows_N is not None:
            terms, shares_SR = terms.select(rows_N), shares_SR.index_select(1, rows_N)
            hidden_ND = hidden_RD.index_select(0, rows_N)
        matrix = Matrix(weight_VD, bias, ctx.cut.slab, ctx.shard)
        rows = _Rows(hidden_ND, terms, shares_SR, rows_N, kept)
        grad_ND, grad_weight, grad_bias = _slab_gradients(matrix, rows, ctx.cut, ctx.needs_input_grad)
        if grad_ND is not None and ctx.shard is not None:
            # each rank has added up its own vocabulary entries only
            grad_ND = ctx.shard.collectives.sum(grad_ND)
        if grad_ND is not None:
            grad_ND = grad_ND.to(hidden_RD.dtype)
            if rows_N is not None:
                grad_ND = torch.zeros_like(hidden_RD).index_copy_(0, rows_N, grad_ND)
        return grad_ND, grad_weight, grad_bias, None, None, None, None


def _all_sums(
    matrix: Matrix, hidden_RD: Tensor, targets_R: Tensor, cut: _Cut, options: _Options, *, hold: bool
) -> _Sums:
    """Chunk after chunk, then the ranks; where slabs are kept there is one chunk."""
    flags = OutputFlags(options.with_entropy, options.with_argmax, options.top_k, hold)
    parts: list[ChunkSums] = [
        chunk_sums(matrix, hidden, targets, cut.shape, cut.epilogue, flags)
        for hidden, targets in zip(hidden_RD.split(cut.chunk), targets_R.split(cut.chunk), strict=True)
    ]
    sums = merge_slabs([part.rows for part in parts])
    if matrix.shard is not None:
        sums = merged_over_ranks(sums, matrix.shard.collectives)
    rows = to_logprobs(sums, targets_R)
    shares_SR = torch.cat([part.log_masses_SR for part in parts], 1) - rows.highest - rows.log_total
    return _Sums(rows, shares_SR, parts[0].held_SRC, _top(parts, rows, matrix, options.top_k))


def _top(parts: list[ChunkSums], rows: RowSums, matrix: Matrix, top_k: int) -> tuple[Tensor, Tensor] | None:
    """Compute log-probabilities and ids of the k highest entries, over all ranks."""
    if not top_k:
        return None
    tops = [part.top for part in parts if part.top is not None]
    values, ids = (torch.cat(column) for column in zip(*tops, strict=True))
    if matrix.shard is not None:
        values, ids = top_k_over_ranks(values, ids, top_k, matrix.shard.collectives)
    return values - rows.highest[:, None] - rows.log_total[:, None], ids


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows with an upstream gradient."""

    hidden_ND: Tensor
    terms: RowTerms
    shares_SN: Tensor
    places_N: Tensor | None
    """Their places among the rows of the kept slabs; None where they are all of them."""
    held_SRC: list[Tensor]


def _slab_gradients(
    matrix: Matrix, rows: _Rows, cut: _Cut, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    chunk = cut.chunk
    chunks = list(
        zip(rows.hidden_ND.split(chunk), rows.terms.split(chunk), rows.shares_SN.split(chunk, 1), strict=True)
    )
    sum_ND = torch.zeros_like(rows.hidden_ND, dtype=sum_dtype(rows.hidden_ND)) if needs[0] else None
    gradients = Gradients(matrix, needs_weight=needs[1], needs_bias=needs[2], num_additions=len(chunks))
    # slabs outside, chunks inside: each slice of dW is finished before the next one is begun
    for number, start, stop in matrix.starts() if rows.held_SRC else traced(matrix.starts()):
        for index, (hidden_ND, terms, shares_SN) in enumerate(chunks):
            if rows.held_SRC:
                held_NC = rows.held_SRC[number]
                held_NC = held_NC if rows.places_N is None else held_NC.index_select(0, rows.places_N)
            else:
                held_NC = cut.epilogue.held(matrix.products(hidden_ND, start, stop), cut.shape)
            # kept slabs may serve another backward: only products formed again and selected copies are written over
            free = not rows.held_SRC or rows.places_N is not None
            arguments = (held_NC, terms, shares_SN[number], matrix.offset + start, cut.shape, hidden_ND.dtype)
            slopes_NC = cut.epilogue.gradients(*arguments, free=free)
            del held_NC, arguments  # the slab is freed before the products below take memory
            if sum_ND is not None:
                add_hidden(sum_ND[index * chunk : index * chunk + chunk], slopes_NC, matrix.weight_VD[start:stop])
            gradients.add(slopes_NC, hidden_ND, start, stop, first=index == 0)
            del slopes_NC
    return sum_ND, gradients.weight(), gradients.bias()


def of_one_type(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all three in the type of the matrix, or of autocast where that is on."""
    device = hidden_RD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
    return hidden_RD.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def counted_rows(targets_R: Tensor) -> Tensor | None:
    """[N] the rows with a target, or None where all have one."""
    counted_R = targets_R != IGNORED
    return None if bool(counted_R.all()) else counted_R.nonzero()[:, 0]


def rows_with_gradient(has_gradient_R: Tensor) -> Tensor | None:
    """[N] the rows whose products are worth computing, or None where all are computed.

    Each row that is left out saves its part of every product. On a GPU none is: the host would wait for the device
    before it starts the products, and samples without an advantage are left out of a batch already.
    """
    if device_type(has_gradient_R) == "cuda":
        return None
    rows_N = has_gradient_R.nonzero()[:, 0]
    return rows_N if rows_N.shape[0] < has_gradient_R.shape[0] else None


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return true where autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
