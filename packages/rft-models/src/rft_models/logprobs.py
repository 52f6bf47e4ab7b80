"""Hidden states and the output matrix -> log-probabilities, without a [tokens, vocabulary] matrix alive.

    z_v = softcap(h . W_v + b_v) / temperature        log p(y) = z_y - log sum_v exp z_v
    H = log sum_v exp z_v - sum_v p_v z_v

The log-sum-exp is float32 (float64 for float64 inputs) and runs over slabs of the vocabulary with
a running maximum, so one slab of logits is alive at a time. The upstream gradient g of each row is
not known in the forward pass, so the backward pass forms each slab again:

    dz_v = g (1[v = y] - p_v) - g_H p_v (log p_v + H)

Slabs run over the vocabulary and not over the rows because each slice of the weight gradient is
then written once, instead of one [V, D] accumulation per chunk of rows (2048 x 512 x 32000 on a
CPU: 0.61 of the time in bfloat16, 0.84 in float32). Where all probabilities of the rows are small
enough they stay in memory, which saves the second product and the second exponential: 3 products
instead of 4 (512 x 256 x 32000 on one CPU thread: 0.64 of the time). Rows whose upstream gradient is
zero (clipped, masked, groups without advantage) are left out of the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_models.linear import linear, product_nt, product_tn

_KEEP_ELEMENTS = 33_554_432
"""Probabilities up to this many elements (128 MiB in float32) are kept for the backward pass."""

_SLAB_ELEMENTS = 2_097_152
"""Size of a slab: 8 MiB in float32 stay in a shared last-level cache between the passes over them, and
come from memory that is in use already (fresh pages cost ten times a pass: 65 MiB take 27 ms to touch)."""

_MIN_SLAB = 256


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
) -> tuple[Tensor, Tensor | None]:
    """Log-probability in nats of `targets_R` under softmax(softcap(h W^T + b) / temperature), and the entropy.

    Args:
        hidden_RD: final hidden states, one row a predicted token.
        weight_VD: output matrix.
        targets_R: int64 token ids in [0, V).
        bias: [V] or None.
        temperature: positive divisor of the logits.
        softcap: c of z -> c tanh(z / c), applied before the temperature, or None.
        chunk_size: rows computed at a time, the logits never whole in memory; None picks by size
            (small logits are kept, large ones are cut along the vocabulary only).
        slab_size: vocabulary entries computed at a time; None picks by size.
        with_entropy: also return the entropy of each row in nats, else None.
        entropy_gradient: let gradients flow through the entropy; without it the entropy is detached.

    Returns:
        ([R] log-probabilities, [R] entropies or None), float32, or float64 for float64 inputs.
    """
    num_rows = hidden_RD.shape[0]
    chunk = max(1, num_rows if chunk_size is None else min(chunk_size, num_rows))
    slab = max(_MIN_SLAB, _SLAB_ELEMENTS // chunk) if slab_size is None else max(1, slab_size)
    small = chunk_size is None and num_rows * weight_VD.shape[0] <= _KEEP_ELEMENTS
    keep = small and softcap is None  # with a softcap the logits are needed again
    cut = _Cut(temperature, softcap, chunk, slab, keep)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden_RD, weight_VD, bias))):
        sums = _all_sums(hidden_RD, weight_VD, bias, targets_R, cut.without_keeping(), with_entropy)
        return sums.logprobs, sums.entropy if with_entropy else None
    result = _SlabLogprobs.apply(hidden_RD, weight_VD, bias, targets_R, cut, with_entropy, entropy_gradient)
    assert isinstance(result, tuple)
    return result[0], result[1] if with_entropy else None


@dataclass(frozen=True, slots=True)
class _Cut:
    """How logits are made from products, and how many rows and vocabulary entries at a time."""

    temperature: float
    softcap: float | None
    chunk: int
    slab: int
    keep: bool
    """Whether the probabilities stay for the backward pass; then one chunk holds all rows."""

    def without_keeping(self) -> _Cut:
        """The same cut for a pass that no backward pass follows."""
        return replace(self, keep=False)

    def logits_RC(self, hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, start: int) -> Tensor:
        """[R, C] logits of vocabulary entries start .. start + slab, capped and divided by the temperature."""
        bias_C = None if bias is None else bias[start : start + self.slab]
        logits_RC = linear(hidden_RD, weight_VD[start : start + self.slab], bias_C).to(_sum_dtype(hidden_RD))
        if self.softcap is not None:
            logits_RC = logits_RC.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_RC if self.temperature == 1.0 else logits_RC.div_(self.temperature)


class _SlabLogprobs(torch.autograd.Function):
    """Slabs of the vocabulary, logits formed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        targets_R: Tensor,
        cut: _Cut,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        sums = _all_sums(hidden_RD, weight_VD, bias, targets_R, cut, with_entropy)
        ctx.save_for_backward(
            hidden_RD, weight_VD, bias, targets_R, sums.normalizer, sums.entropy, sums.shares, *sums.probs
        )
        ctx.cut = cut
        ctx.entropy_gradient = with_entropy and entropy_gradient
        if not ctx.entropy_gradient:
            ctx.mark_non_differentiable(sums.entropy)
        ctx.set_materialize_grads(False)
        return sums.logprobs, sums.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias, targets_R, normalizer_R, entropy_R, shares_SR, *probs_SRC = ctx.saved_tensors
        grad_R = grads[0] if grads[0] is not None else torch.zeros_like(normalizer_R)
        entropy_grad_R = grads[1] if ctx.entropy_gradient and grads[1] is not None else torch.zeros_like(grad_R)
        rows_N = ((grad_R != 0) | (entropy_grad_R != 0)).nonzero()[:, 0]
        if rows_N.shape[0] < grad_R.shape[0]:
            probs_SRC = [probs_RC.index_select(0, rows_N) for probs_RC in probs_SRC]
        rows = _Rows(
            *(
                tensor.index_select(0, rows_N)
                for tensor in (hidden_RD, targets_R, normalizer_R, grad_R, entropy_R, entropy_grad_R)
            ),
            shares_SN=shares_SR.index_select(1, rows_N),
            probs_SNC=probs_SRC,
        )
        grad_hidden_ND, grad_weight, grad_bias = _slab_gradients(ctx, rows, weight_VD, bias)
        grad_hidden = None
        if grad_hidden_ND is not None:
            grad_hidden = torch.zeros_like(hidden_RD).index_copy_(0, rows_N, grad_hidden_ND.to(hidden_RD.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the forward pass found: [R] each, besides the slabs'."""

    logprobs: Tensor
    normalizer: Tensor
    entropy: Tensor
    shares: Tensor
    """[S, R]: the probability of each slab."""
    probs: list[Tensor]
    """S times [R, C], each slab's softmax over its own entries; empty unless kept."""


def _all_sums(
    hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_R: Tensor, cut: _Cut, with_entropy: bool
) -> _Sums:
    """Chunk after chunk; where probabilities are kept there is one chunk."""
    parts = [
        _chunk_sums(hidden, weight_VD, bias, targets, cut, with_entropy)
        for hidden, targets in zip(hidden_RD.split(cut.chunk), targets_R.split(cut.chunk), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return _Sums(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.normalizer for part in parts]),
        torch.cat([part.entropy for part in parts]),
        torch.cat([part.shares for part in parts], 1),
        [],
    )


def _chunk_sums(
    hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_R: Tensor, cut: _Cut, with_entropy: bool
) -> _Sums:
    """With the highest logit z* of a slab at 0 its largest probability is 1 / sum_v exp(z_v - z*), so the
    softmax, the fastest pass over exponentials that torch has, gives the log-sum-exp as well.
    """
    highest_SR, own_SR, moment_SR, target_SR, probs_SRC = [], [], [], [], []
    for start in range(0, weight_VD.shape[0], cut.slab):
        logits_RC = cut.logits_RC(hidden_RD, weight_VD, bias, start)
        highest_R = logits_RC.amax(1)
        probs_RC = torch.softmax(logits_RC.sub_(highest_R[:, None]), 1)
        inside_R, column_R = _columns(targets_R, start, logits_RC.shape[1])
        highest_SR.append(highest_R)
        own_SR.append(probs_RC.amax(1).log().neg_())
        target_SR.append(torch.where(inside_R, logits_RC.gather(1, column_R)[:, 0], -torch.inf))
        if with_entropy:
            moment_SR.append(torch.linalg.vecdot(probs_RC, logits_RC))
        if cut.keep:
            probs_SRC.append(probs_RC)
    # Everything is measured from the row's highest logit, so that large logits cost no digits.
    highest = torch.stack(highest_SR)
    top_R = highest.amax(0)
    own = torch.stack(own_SR) + (highest - top_R)
    normalizer_R = own[0] if len(own_SR) == 1 else own.logsumexp(0)
    shares = (own - normalizer_R).exp()
    height = highest - top_R - normalizer_R
    logprobs_R = (torch.stack(target_SR) + height).amax(0)  # -inf but in the slab that holds the target
    entropy_R = torch.zeros_like(normalizer_R)
    if with_entropy:
        entropy_R = -(shares * (height + torch.stack(moment_SR))).sum(0)
    return _Sums(logprobs_R, top_R + normalizer_R, entropy_R, shares, probs_SRC)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows with an upstream gradient: hidden states [N, D], the rest [N]."""

    hidden: Tensor
    targets: Tensor
    normalizer: Tensor
    grad: Tensor
    entropy: Tensor
    entropy_grad: Tensor
    shares_SN: Tensor
    """[S, N]."""
    probs_SNC: list[Tensor]
    """As in `_Sums`, of these rows."""

    def split(self, size: int) -> list[_Rows]:
        """Chunks of at most `size` rows; rows whose probabilities are kept are one chunk."""
        if self.probs_SNC or self.hidden.shape[0] <= size:
            return [self]
        fields = (self.hidden, self.targets, self.normalizer, self.grad, self.entropy, self.entropy_grad)
        parts = zip(*(tensor.split(size) for tensor in fields), self.shares_SN.split(size, 1), strict=True)
        return [_Rows(*tensors, probs_SNC=[]) for tensors in parts]


def _slab_gradients(
    ctx: Any, rows: _Rows, weight_VD: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    cut: _Cut = ctx.cut
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    chunks = rows.split(cut.chunk)
    sums = [torch.zeros(part.hidden.shape, dtype=_sum_dtype(part.hidden), device=weight_VD.device) for part in chunks]
    grad_weight = torch.empty_like(weight_VD) if needs_weight else None
    grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
    for start in range(0, weight_VD.shape[0], cut.slab):
        stop = min(start + cut.slab, weight_VD.shape[0])
        for number, part in enumerate(chunks):
            if part.probs_SNC:
                dlogits_NC = _kept_gradients(part, start, cut, ctx.entropy_gradient)
            else:
                logits_NC = cut.logits_RC(part.hidden, weight_VD, bias, start)
                dlogits_NC = _logit_gradients(logits_NC, part, start, cut, ctx.entropy_gradient)
            dlogits_NC = dlogits_NC.to(part.hidden.dtype)
            if needs_hidden:
                sums[number] += product_nt(dlogits_NC, weight_VD[start:stop].t())
            if grad_weight is not None and stop - start == weight_VD.shape[0] and len(chunks) == 1:
                grad_weight = product_tn(dlogits_NC, part.hidden)
            elif grad_weight is not None and number == 0:
                product_tn(dlogits_NC, part.hidden, out_NK=grad_weight[start:stop])
            elif grad_weight is not None:
                grad_weight[start:stop] += product_tn(dlogits_NC, part.hidden)
            if grad_bias is not None:
                grad_bias[start:stop] += dlogits_NC.sum(0)
    return torch.cat(sums) if needs_hidden else None, grad_weight, grad_bias


def _kept_gradients(rows: _Rows, start: int, cut: _Cut, entropy_gradient: bool) -> Tensor:
    """As `_logit_gradients`, from the kept probabilities q of the slab: p = q times the slab's share."""
    number = start // cut.slab
    probs_NC, share_N1 = rows.probs_SNC[number], rows.shares_SN[number][:, None]
    inside_N, column_N = _columns(rows.targets, start, probs_NC.shape[1])
    if entropy_gradient:
        probs_NC, share_N1 = probs_NC * share_N1, torch.ones_like(share_N1)
    coefficient_N1 = rows.grad[:, None] + rows.entropy_grad[:, None] * rows.entropy[:, None]
    gradients_NC = probs_NC * (coefficient_N1 * share_N1).div_(-cut.temperature)
    if entropy_gradient:
        gradients_NC -= torch.xlogy(probs_NC, probs_NC).mul_(rows.entropy_grad[:, None] / cut.temperature)
    return gradients_NC.scatter_add_(1, column_N, (rows.grad * inside_N / cut.temperature)[:, None])


def _logit_gradients(logits_NC: Tensor, rows: _Rows, start: int, cut: _Cut, entropy_gradient: bool) -> Tensor:
    """d objective / d (h W^T + b): the formula at the top, then 1/temperature and the softcap's 1 - tanh^2."""
    logprobs_NC = logits_NC - rows.normalizer[:, None]
    probs_NC = logprobs_NC.exp()
    coefficient_NC = rows.grad[:, None]
    if entropy_gradient:
        coefficient_NC = coefficient_NC + rows.entropy_grad[:, None] * (logprobs_NC + rows.entropy[:, None])
    gradients_NC = probs_NC.mul_(coefficient_NC).neg_()
    inside_N, column_N = _columns(rows.targets, start, logits_NC.shape[1])
    gradients_NC.scatter_add_(1, column_N, (rows.grad * inside_N)[:, None])
    if cut.softcap is not None:
        gradients_NC.mul_(1 - (logits_NC * (cut.temperature / cut.softcap)).square_())
    return gradients_NC.div_(cut.temperature)


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _columns(targets_R: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """([R] bool: the target lies in this slab, [R, 1] its column, 0 where it does not)."""
    inside_R = (targets_R >= start) & (targets_R < start + width)
    return inside_R, torch.where(inside_R, targets_R - start, 0)[:, None]
