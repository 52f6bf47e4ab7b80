"""Hidden states and the output matrix -> log-probabilities, without a [tokens, vocabulary] matrix alive.

    z_v = softcap(h . W_v + b_v) / temperature        log p(y) = z_y - log sum_v exp z_v
    H = log sum_v exp z_v - sum_v p_v z_v

The log-sum-exp is float32 (float64 for float64 inputs) and runs over slabs of the vocabulary with
a running maximum, so one slab of logits is alive at a time. The upstream gradient g of each row is
not known in the forward pass, so the backward pass forms each slab again:

    dz_v = g (1[v = y] - p_v) - g_H p_v (log p_v + H)

Slabs run over the vocabulary and not over the rows because each slice of the weight gradient is
then written once, instead of one [V, D] accumulation per chunk of rows (2048 x 512 x 32000 on a
CPU: 0.61 of the time in bfloat16, 0.84 in float32). A vocabulary whose whole logits are small is one
slab that stays in memory, which saves the second product: 3 products instead of 4. Rows whose
upstream gradient is zero (clipped, masked, groups without advantage) are left out of the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_models.linear import linear, product_nt, product_tn

_KEEP_ELEMENTS = 8_388_608
"""Logits up to this many elements (32 MiB in float32) are one slab and kept for the backward pass."""

_SLAB_ELEMENTS = 2_097_152
"""Size of a slab otherwise: 8 MiB in float32 stay in a shared last-level cache between the passes over them."""

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
    num_rows, vocab_size = hidden_RD.shape[0], weight_VD.shape[0]
    if chunk_size is None and slab_size is None and num_rows * vocab_size <= _KEEP_ELEMENTS:
        return _whole(hidden_RD, weight_VD, targets_R, bias, temperature, softcap, with_entropy, entropy_gradient)
    chunk = max(1, num_rows if chunk_size is None else min(chunk_size, num_rows))
    slab = max(_MIN_SLAB, _SLAB_ELEMENTS // chunk) if slab_size is None else max(1, slab_size)
    result = _SlabLogprobs.apply(
        hidden_RD, weight_VD, bias, targets_R, _Cut(temperature, softcap, chunk, slab), with_entropy, entropy_gradient
    )
    assert isinstance(result, tuple)
    return result[0], result[1] if with_entropy else None


@dataclass(frozen=True, slots=True)
class _Cut:
    """How logits are made from products, and how many rows and vocabulary entries at a time."""

    temperature: float
    softcap: float | None
    chunk: int
    slab: int

    def logits_RC(self, hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, start: int) -> Tensor:
        """[R, C] logits of vocabulary entries start .. start + slab, capped and divided by the temperature."""
        bias_C = None if bias is None else bias[start : start + self.slab]
        logits_RC = linear(hidden_RD, weight_VD[start : start + self.slab], bias_C).to(_sum_dtype(hidden_RD))
        if self.softcap is not None:
            logits_RC = logits_RC.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_RC if self.temperature == 1.0 else logits_RC.div_(self.temperature)


def _whole(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """One slab through plain autograd: log_softmax keeps [R, V] for the backward pass, nothing is computed twice."""
    logits_RV = linear(hidden_RD, weight_VD, bias)
    logits_RV = logits_RV if logits_RV.dtype is torch.float64 else logits_RV.float()
    if softcap is not None:
        logits_RV = softcap * torch.tanh(logits_RV / softcap)
    if temperature != 1.0:
        logits_RV = logits_RV / temperature
    logprobs_RV = torch.log_softmax(logits_RV, -1)
    logprobs_R = logprobs_RV.gather(1, targets_R[:, None])[:, 0]
    if not with_entropy:
        return logprobs_R, None
    source = logprobs_RV if entropy_gradient else logprobs_RV.detach()
    return logprobs_R, -(source.exp() * source).sum(-1)


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
        parts = [
            _row_sums(hidden, weight_VD, bias, targets, cut, with_entropy)
            for hidden, targets in zip(hidden_RD.split(cut.chunk), targets_R.split(cut.chunk), strict=True)
        ]
        target_R, normalizer_R, entropy_R = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_RD, weight_VD, bias, targets_R, normalizer_R, entropy_R)
        ctx.cut = cut
        ctx.entropy_gradient = with_entropy and entropy_gradient
        if not ctx.entropy_gradient:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return target_R - normalizer_R, entropy_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias, targets_R, normalizer_R, entropy_R = ctx.saved_tensors
        grad_R = grads[0] if grads[0] is not None else torch.zeros_like(normalizer_R)
        entropy_grad_R = grads[1] if ctx.entropy_gradient and grads[1] is not None else torch.zeros_like(grad_R)
        rows_N = ((grad_R != 0) | (entropy_grad_R != 0)).nonzero()[:, 0]
        rows = _Rows(
            *(
                tensor.index_select(0, rows_N)
                for tensor in (hidden_RD, targets_R, normalizer_R, grad_R, entropy_R, entropy_grad_R)
            )
        )
        grad_hidden_ND, grad_weight, grad_bias = _slab_gradients(ctx, rows, weight_VD, bias)
        grad_hidden = None
        if grad_hidden_ND is not None:
            grad_hidden = torch.zeros_like(hidden_RD).index_copy_(0, rows_N, grad_hidden_ND.to(hidden_RD.dtype))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _row_sums(
    hidden_RD: Tensor, weight_VD: Tensor, bias: Tensor | None, targets_R: Tensor, cut: _Cut, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(target logit, log-sum-exp, entropy) of each row, [R] each, with a running maximum over the slabs."""
    highest_R = torch.full((hidden_RD.shape[0],), -torch.inf, dtype=_sum_dtype(hidden_RD), device=hidden_RD.device)
    total_R, moment_R, target_R = (torch.zeros_like(highest_R) for _ in range(3))
    for start in range(0, weight_VD.shape[0], cut.slab):
        logits_RC = cut.logits_RC(hidden_RD, weight_VD, bias, start)
        new_highest_R = torch.maximum(highest_R, logits_RC.amax(1))
        weights_RC = torch.exp(logits_RC - new_highest_R[:, None])
        shrink_R = torch.exp(highest_R - new_highest_R)
        total_R = total_R * shrink_R + weights_RC.sum(1)
        if with_entropy:
            moment_R = moment_R * shrink_R + weights_RC.mul_(logits_RC).sum(1)
        inside_R, column_R = _columns(targets_R, start, logits_RC.shape[1])
        target_R = torch.where(inside_R, logits_RC.gather(1, column_R)[:, 0], target_R)
        highest_R = new_highest_R
    normalizer_R = highest_R + total_R.log()
    return target_R, normalizer_R, normalizer_R - moment_R / total_R


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows with an upstream gradient: hidden states [N, D], the rest [N]."""

    hidden: Tensor
    targets: Tensor
    normalizer: Tensor
    grad: Tensor
    entropy: Tensor
    entropy_grad: Tensor

    def split(self, size: int) -> list[_Rows]:
        """Chunks of at most `size` rows."""
        fields = (self.hidden, self.targets, self.normalizer, self.grad, self.entropy, self.entropy_grad)
        return [_Rows(*part) for part in zip(*(tensor.split(size) for tensor in fields), strict=True)]


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
            logits_NC = cut.logits_RC(part.hidden, weight_VD, bias, start)
            dlogits_NC = _logit_gradients(logits_NC, part, start, cut, ctx.entropy_gradient).to(part.hidden.dtype)
            if needs_hidden:
                sums[number] += product_nt(dlogits_NC, weight_VD[start:stop].t())
            if grad_weight is not None and number == 0:
                grad_weight[start:stop] = product_tn(dlogits_NC, part.hidden)
            elif grad_weight is not None:
                grad_weight[start:stop] += product_tn(dlogits_NC, part.hidden)
            if grad_bias is not None:
                grad_bias[start:stop] += dlogits_NC.sum(0)
    return torch.cat(sums) if needs_hidden else None, grad_weight, grad_bias


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
