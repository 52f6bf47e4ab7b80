"""Per-token objectives at three products with the output matrix in place of four.

Where the objective of a row follows from that row's own log-probability and entropy, and from known numbers,
its gradient is known as soon as the row's logits are. So the logits of a chunk of rows are formed once:

    logits -> sums -> log p(y), H -> objective -> g, g_H -> dz in place of the logits -> dX, dW

all in the forward pass; the backward pass only scales. The other way, `linear_logprobs` and then the
objective, forms the logits a second time in the backward. Rows whose gradient is zero (clipped tokens,
groups without advantage) are dropped before dX and dW, so that the cost is 1 + 2 f products with f the share
of rows left, and a frozen matrix gets no dW. Objectives over sequences (ratios of whole sequences) need
numbers of other rows and cannot be computed this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_models.logprobs.backend import EpilogueName, choose_epilogue
from rft_models.logprobs.epilogue import Epilogue, RowTerms, Shape
from rft_models.logprobs.linear_logprobs import counted_rows, needs_gradient, of_one_type, rows_with_gradient, slab_for
from rft_models.logprobs.planned_device import device_type, held_slab, traced
from rft_models.logprobs.row_statistics import RowSums, VocabularyShard, merged_over_ranks, to_logprobs
from rft_models.logprobs.vocab_slabs import (
    ChunkSums,
    Gradients,
    Matrix,
    OutputFlags,
    add_hidden,
    chunk_sums,
    log_shares,
    row_terms,
    sum_dtype,
)

TokenObjective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probabilities [N], entropies [N], rows [N] int64) -> losses [N], weights and denominators applied.

The first two carry gradients; `rows` are the places among the rows given to `linear_loss`, to pick advantages
and old log-probabilities with. It may be called once for each chunk of rows, and row i of the result may
depend on row i of the arguments alone."""

_CHUNK_LOGITS = 16_777_216
_CUDA_CHUNK_LOGITS = 1_342_177_280
"""Logits of a chunk of rows. Each chunk after the first reads and writes the [V, D] gradient once more: on a CPU at
2048 x 512 x 32000 in float32, half of this takes 1.1 times as long. On a GPU all of 8192 x 151936 is one chunk."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The objective of all rows, and what it was computed from."""

    loss: Tensor
    """[] float32 (float64 for float64 inputs), the sum of the rows' losses; the one with a gradient."""
    logprobs: Tensor
    """[R], 0 for ignored targets."""
    entropy: Tensor
    """[R] in nats, 0 for ignored targets."""


def linear_loss(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    per_token_objective: TokenObjective,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    shard: VocabularyShard | None = None,
    epilogue: EpilogueName | None = None,
    all_counted: bool = False,
) -> LossOutputs:
    """Sum over rows an objective of log p(target) and entropy, with gradients of hidden states and head.

    Equal to the objective applied to `linear_logprobs(..., with_entropy=True, entropy_gradient=True)`.
    The backward can run once. Arguments as in `linear_outputs`; `per_token_objective` see `TokenObjective`,
    it is not called for ignored rows, and tensors that it uses get no gradient.
    """
    hidden_RD, weight_VD, bias = of_one_type(hidden_RD, weight_VD, bias)
    shape = Shape(temperature, softcap)
    rows_N = None if all_counted else counted_rows(targets_R)
    num_rows = hidden_RD.shape[0] if rows_N is None else rows_N.shape[0]
    max_rows = chunk_for(hidden_RD, weight_VD) if chunk_size is None else chunk_size
    chunk = max(1, -(-num_rows // max(1, -(-num_rows // max_rows))))  # chunks of one size: none is left with a few rows
    passes = choose_epilogue(hidden_RD, num_rows * weight_VD.shape[0], shape, epilogue)
    plan = _Plan(per_token_objective, shape, chunk, passes, rows_N, shard)
    if needs_gradient(hidden_RD, weight_VD, bias):
        results: Any = _FusedLoss.apply(hidden_RD, weight_VD, bias, targets_R, plan)
        return LossOutputs(*results)
    work = _Work(plan, hidden_RD, weight_VD, bias, targets_R, (False, False, False))
    work.run()
    return LossOutputs(work.loss, work.logprobs_R, work.entropy_R)


def chunk_for(hidden_RD: Tensor, weight_VD: Tensor) -> int:
    """Rows whose logits are alive at a time."""
    limit = _CUDA_CHUNK_LOGITS if device_type(hidden_RD) == "cuda" else _CHUNK_LOGITS
    return max(1, limit // max(1, weight_VD.shape[0]))


@dataclass(frozen=True, slots=True)
class _Plan:
    objective: TokenObjective
    shape: Shape
    chunk: int
    epilogue: Epilogue
    rows_N: Tensor | None
    """The rows with a target, None where all have one."""
    shard: VocabularyShard | None


class _FusedLoss(torch.autograd.Function):
    """Gradients in the forward pass, scaled by the upstream number in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_R: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = _Work(plan, hidden_RD, weight_VD, bias, targets_R, ctx.needs_input_grad[:3])
        work.run()
        ctx.gradients = work.gradients()
        ctx.mark_non_differentiable(work.logprobs_R, work.entropy_R)
        ctx.set_materialize_grads(False)
        return work.loss, work.logprobs_R, work.entropy_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # given up here, since they may be scaled in place: a second backward would scale them twice
        gradients, ctx.gradients = ctx.gradients, None
        if grads[0] is None:
            return None, None, None, None, None
        if gradients is None:
            raise RuntimeError("linear_loss keeps its gradients for one backward pass; compute the loss again")
        # on a GPU reading the number would wait for the device
        plain = grads[0].device.type == "cpu" and float(grads[0]) == 1.0
        scaled = [x if x is None or plain else x.mul_(grads[0].to(x.dtype)) for x in gradients]
        return *scaled, None, None


class _Work:
    """State of one call: the rows with a target, chunk after chunk."""

    def __init__(
        self,
        plan: _Plan,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_R: Tensor,
        needs: tuple[bool, ...],
    ) -> None:
        self._plan = plan
        self._hidden_RD, self._targets_R = hidden_RD, targets_R
        slab = held_slab(slab_for(hidden_RD, plan.chunk), weight_VD.shape[0])
        self._matrix = Matrix(weight_VD, bias, slab, plan.shard)
        self._needs = needs
        num_rows = hidden_RD.shape[0] if plan.rows_N is None else plan.rows_N.shape[0]
        self._starts = range(0, num_rows, plan.chunk)
        needed = {"needs_weight": needs[1], "needs_bias": needs[2]}
        self._gradients = Gradients(self._matrix, **needed, num_additions=len(self._starts))
        self._grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=sum_dtype(hidden_RD)) if needs[0] else None
        self.logprobs_R = hidden_RD.new_zeros(hidden_RD.shape[0], dtype=sum_dtype(hidden_RD))
        self.entropy_R = torch.zeros_like(self.logprobs_R)
        self.loss = self.logprobs_R.new_zeros(())

    def run(self) -> None:
        """Compute the values, and the gradients that are needed."""
        for start in traced(self._starts):
            self._chunk(start, first=start == 0)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, matrix and bias, in their types; may be called once."""
        grad_RD, self._grad_hidden_RD = self._grad_hidden_RD, None
        if grad_RD is not None and self._plan.shard is not None:
            grad_RD = self._plan.shard.collectives.sum(grad_RD)
        grad_RD = None if grad_RD is None else grad_RD.to(self._hidden_RD.dtype)
        return grad_RD, self._gradients.weight(), self._gradients.bias()

    def _chunk(self, start: int, *, first: bool) -> None:
        plan = self._plan
        stop = start + plan.chunk
        rows_N = torch.arange(start, min(stop, self._hidden_RD.shape[0]), device=self._targets_R.device)
        hidden_ND, targets_N = self._hidden_RD[start:stop], self._targets_R[start:stop]
        if plan.rows_N is not None:
            rows_N = plan.rows_N[start:stop]
            hidden_ND, targets_N = self._hidden_RD.index_select(0, rows_N), self._targets_R.index_select(0, rows_N)
        flags = OutputFlags(moment=True, hold=any(self._needs))
        sums = chunk_sums(self._matrix, hidden_ND, targets_N, plan.shape, plan.epilogue, flags)
        row_sums = sums.rows if plan.shard is None else merged_over_ranks(sums.rows, plan.shard.collectives)
        rows = to_logprobs(row_sums, targets_N)
        loss, grad_N, entropy_grad_N = _objective(plan.objective, rows, rows_N, with_gradient=any(self._needs))
        self.loss = self.loss + loss
        self.logprobs_R.index_copy_(0, rows_N, rows.logprobs)
        self.entropy_R.index_copy_(0, rows_N, rows.entropy)
        if grad_N is not None:
            terms = row_terms(rows, targets_N, grad_N, entropy_grad_N)
            self._add(terms, sums, log_shares(sums, rows), hidden_ND, rows_N, first=first)

    def _add(
        self, terms: RowTerms, sums: ChunkSums, shares_SN: Tensor, hidden_ND: Tensor, rows_N: Tensor, *, first: bool
    ) -> None:
        """Add the gradients of a chunk; each held slab is released as soon as it is used."""
        plan, matrix = self._plan, self._matrix
        live_N = terms.grad != 0
        if terms.entropy_grad is not None:
            live_N |= terms.entropy_grad != 0
        chosen_N = rows_with_gradient(live_N)
        if chosen_N is not None:
            terms, shares_SN = terms.select(chosen_N), shares_SN.index_select(1, chosen_N)
            hidden_ND, rows_N = hidden_ND.index_select(0, chosen_N), rows_N.index_select(0, chosen_N)
        sum_ND = None
        if self._grad_hidden_RD is not None:
            # of the rows that are left; put among the others once all slabs have been added
            sum_ND = torch.zeros_like(hidden_ND, dtype=self._grad_hidden_RD.dtype)
        sums.held_SRC.reverse()  # popped from the end below, first slab first
        for number, start, stop in matrix.starts():
            held_NC = sums.held_SRC.pop()
            held_NC = held_NC if chosen_N is None else held_NC.index_select(0, chosen_N)
            arguments = (held_NC, terms, shares_SN[number], matrix.offset + start, plan.shape, hidden_ND.dtype)
            slopes_NC = plan.epilogue.gradients(*arguments, free=True)
            del held_NC, arguments  # the slab is freed before the products below take memory
            if sum_ND is not None:
                add_hidden(sum_ND, slopes_NC, matrix.weight_VD[start:stop])
            self._gradients.add(slopes_NC, hidden_ND, start, stop, first=first)
            del slopes_NC
        if sum_ND is not None and self._grad_hidden_RD is not None:
            self._grad_hidden_RD.index_copy_(0, rows_N, sum_ND)


def _objective(
    objective: TokenObjective, rows: RowSums, rows_N: Tensor, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(sum of losses, its gradient by each log-probability, by each entropy or None where there is none)."""
    with torch.set_grad_enabled(with_gradient):
        # leaves of a graph of their own: the objective's backward ends here, the formulas of the slabs do the rest
        logprobs_N = rows.logprobs.detach().requires_grad_(with_gradient)
        entropy_N = rows.entropy.detach().requires_grad_(with_gradient)
        losses_N = objective(logprobs_N, entropy_N, rows_N)
        assert losses_N.shape == rows_N.shape, (
            f"the objective gave {tuple(losses_N.shape)} of {tuple(rows_N.shape)} rows"
        )
        loss = losses_N.sum()
        if not (with_gradient and loss.requires_grad):
            zeros_N = torch.zeros_like(rows.logprobs) if with_gradient else None
            return loss.detach(), zeros_N, None
        grad_N, entropy_grad_N = torch.autograd.grad(loss, (logprobs_N, entropy_N), allow_unused=True)
    return loss.detach(), torch.zeros_like(rows.logprobs) if grad_N is None else grad_N, entropy_grad_N
