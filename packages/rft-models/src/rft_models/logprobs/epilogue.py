"""The two passes over a slab of products h W^T: its sums, and the gradient of the logits.

    dz_v = [g (1[v = y] - p_v) - g_H p_v (log p_v + H)] / temperature * (1 - tanh^2 with a softcap)

An `Epilogue` computes both. Between the two it may hold the slab in another form than the products: here
that is the softmax over the slab's own entries, the fastest pass over exponentials that torch has. With the
highest logit of a slab at 0 its largest probability is 1 / sum_v exp(z_v - z*), so the softmax gives the
log-sum-exp as well, and times the slab's share of the row's mass it gives p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rft_models.logprobs.row_statistics import SlabSums


@dataclass(frozen=True, slots=True)
class Shape:
    """z = softcap(product) / temperature, softcap(x) = c tanh(x / c)."""

    temperature: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class RowTerms:
    """Terms of the gradient of each row's logits, [N] each."""

    targets: Tensor
    logprobs: Tensor
    highest: Tensor
    log_total: Tensor
    entropy: Tensor
    grad: Tensor
    """g, of the log-probability."""
    entropy_grad: Tensor | None
    """g_H."""

    def select(self, rows_N: Tensor) -> RowTerms:
        """Return the terms of these rows alone."""
        return RowTerms(*(None if x is None else x.index_select(0, rows_N) for x in self._fields()))  # type: ignore[arg-type]

    def split(self, size: int) -> list[RowTerms]:
        """Chunks of at most `size` rows."""
        # one empty chunk where there are no rows, as `Tensor.split` gives for the hidden states
        starts = range(0, max(1, self.targets.shape[0]), size)
        return [RowTerms(*(None if x is None else x[i : i + size] for x in self._fields())) for i in starts]  # type: ignore[arg-type]

    def _fields(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in RowTerms.__slots__)


class Epilogue(Protocol):
    """Implementation of the passes over a slab: `EagerEpilogue`, `CompiledEpilogue` or `KernelEpilogue`."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def sums(
        self, products_RC: Tensor, targets_R: Tensor, start: int, shape: Shape, *, moment: bool, argmax: bool
    ) -> tuple[SlabSums, Tensor]:
        """Compute sums of entries start .. start + C; returns also the slab as `gradients` takes it.

        Products are used up.
        """
        ...

    def held(self, products_RC: Tensor, shape: Shape) -> Tensor:
        """Return the slab as `gradients` takes it, from products formed again. Products are used up."""
        ...

    def gradients(
        self,
        held_NC: Tensor,
        rows: RowTerms,
        share_N: Tensor,
        start: int,
        shape: Shape,
        dtype: torch.dtype,
        *,
        free: bool,
    ) -> Tensor:
        """[N, C] gradient of the products in `dtype`.

        `share_N` is the log of the slab's probability; `free` lets `held_NC` be used up.
        """
        ...


@dataclass(frozen=True, slots=True)
class EagerEpilogue:
    """Plain torch, on every device and in every type."""

    reason: str
    name: str = "eager"

    def sums(
        self, products_RC: Tensor, targets_R: Tensor, start: int, shape: Shape, *, moment: bool, argmax: bool
    ) -> tuple[SlabSums, Tensor]:
        """Compute the sums of a slab, see `Epilogue.sums`; returns its logits with a softcap, else its softmax."""
        logits_RC = _logits(products_RC, shape)
        highest_R = logits_RC.amax(1)
        argmax_R = logits_RC.argmax(1) + start if argmax else None
        target_R = target_logits(logits_RC, targets_R, start)
        capped = shape.softcap is not None
        # with a softcap the gradient needs the logits themselves, so they are not written over
        below_RC = (logits_RC - highest_R[:, None]) if capped else logits_RC.sub_(highest_R[:, None])
        probs_RC = torch.softmax(below_RC, 1)
        total_R = probs_RC.amax(1).reciprocal_()  # the highest logit is at 0, so its probability is 1 / sum
        moment_R = torch.linalg.vecdot(probs_RC, below_RC).mul_(total_R) if moment else None
        return SlabSums(highest_R, total_R, moment_R, target_R, argmax_R), logits_RC if capped else probs_RC

    def held(self, products_RC: Tensor, shape: Shape) -> Tensor:
        """Return the slab's logits with a softcap, else its softmax, see `Epilogue.held`."""
        logits_RC = _logits(products_RC, shape)
        return logits_RC if shape.softcap is not None else torch.softmax(logits_RC, 1)

    def gradients(
        self,
        held_NC: Tensor,
        rows: RowTerms,
        share_N: Tensor,
        start: int,
        shape: Shape,
        dtype: torch.dtype,
        *,
        free: bool,
    ) -> Tensor:
        """Compute the gradient of the products, see `Epilogue.gradients`."""
        if shape.softcap is None:
            slopes_NC = _from_probs(held_NC, rows, share_N, shape, dtype, free=free)
        else:
            slopes_NC = _from_logits(held_NC, rows, shape.temperature, shape.softcap).to(dtype)
        return write_targets(slopes_NC, rows, start, shape)


def _logits(products_RC: Tensor, shape: Shape) -> Tensor:
    """Compute logits from products, in place for float32 and float64 products."""
    logits_RC = products_RC if products_RC.dtype is torch.float64 else products_RC.float()
    if shape.softcap is not None:
        logits_RC = logits_RC.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return logits_RC if shape.temperature == 1.0 else logits_RC.div_(shape.temperature)


def _from_probs(
    probs_NC: Tensor, rows: RowTerms, share_N: Tensor, shape: Shape, dtype: torch.dtype, *, free: bool
) -> Tensor:
    share_N1 = share_N.exp()[:, None]
    if rows.entropy_grad is None:
        coefficient_N1 = (rows.grad[:, None] * share_N1).div_(-shape.temperature)
        out = probs_NC if free and dtype is probs_NC.dtype else probs_NC.new_empty(probs_NC.shape, dtype=dtype)
        return torch.mul(probs_NC, coefficient_N1, out=out)
    probs_NC = probs_NC * share_N1
    coefficient_N = rows.grad + rows.entropy_grad * rows.entropy
    slopes_NC = probs_NC * coefficient_N[:, None].div(-shape.temperature)
    # xlogy is 0 where a probability was rounded to 0 and p log p would be NaN
    slopes_NC -= torch.xlogy(probs_NC, probs_NC).mul_((rows.entropy_grad / shape.temperature)[:, None])
    return slopes_NC.to(dtype)


def _from_logits(logits_NC: Tensor, rows: RowTerms, temperature: float, softcap: float) -> Tensor:
    logprobs_NC = (logits_NC - rows.highest[:, None]).sub_(rows.log_total[:, None])
    slopes_NC = logprobs_NC.exp()
    coefficient_NC = rows.grad[:, None]
    if rows.entropy_grad is not None:
        coefficient_NC = coefficient_NC + rows.entropy_grad[:, None] * (logprobs_NC + rows.entropy[:, None])
    slopes_NC = slopes_NC.mul_(coefficient_NC).div_(-temperature)
    return slopes_NC.mul_(1 - (logits_NC * (temperature / softcap)).square_())


def target_logits(logits_RC: Tensor, targets_R: Tensor, start: int) -> Tensor:
    """Return [R] z_y where the target is in the slab, else -inf."""
    inside_R, column_R1 = columns(targets_R, start, logits_RC.shape[1])
    return torch.where(inside_R, logits_RC.gather(1, column_R1)[:, 0], -torch.inf)


def write_targets(slopes_NC: Tensor, rows: RowTerms, start: int, shape: Shape) -> Tensor:
    """Put the gradient of the targets' own entries in place, from float32: 1 - p keeps its digits where p is near 1."""
    inside_N, column_N1 = columns(rows.targets, start, slopes_NC.shape[1])
    slope_N = -rows.grad * torch.expm1(rows.logprobs)
    if rows.entropy_grad is not None:
        slope_N -= rows.entropy_grad * rows.logprobs.exp() * (rows.logprobs + rows.entropy)
    if shape.softcap is not None:
        logits_N = rows.logprobs + rows.log_total + rows.highest
        slope_N = slope_N * (1 - (logits_N * (shape.temperature / shape.softcap)).square())
    # by flat index: an in-place scatter copies the whole slab (2048 x 1024: 300 microseconds against 10)
    flat, width = slopes_NC.view(-1), slopes_NC.shape[1]
    index_N = column_N1[:, 0] + torch.arange(0, flat.shape[0], width, device=flat.device)
    slope_N = (slope_N / shape.temperature).to(flat.dtype)
    flat.index_copy_(0, index_N, torch.where(inside_N, slope_N, flat.index_select(0, index_N)))
    return slopes_NC


def columns(targets_R: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return ([R] bool: the target is in this slab, [R, 1] its column, 0 where it is not)."""
    inside_R = (targets_R >= start) & (targets_R < start + width)
    return inside_R, torch.where(inside_R, targets_R - start, 0)[:, None]
