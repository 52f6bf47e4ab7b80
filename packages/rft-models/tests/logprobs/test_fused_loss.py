"""Objectives within the head's forward against plain float64, and against the split path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rft_models.logprobs import fused_loss as module
from rft_models.logprobs.fused_loss import TokenObjective, linear_loss
from rft_models.logprobs.linear_logprobs import linear_logprobs
from rft_models.logprobs.row_statistics import IGNORED

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(rows: int = 41, width: int = 16, vocab: int = 301, scale: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, bias, targets


def clipped_objective(logprobs_R: Tensor) -> TokenObjective:
    """PPO-clip with weights, a k3 penalty and an entropy bonus; old log-probabilities near the present ones."""
    generator = torch.Generator().manual_seed(2)
    old_R = logprobs_R.detach().double() + 0.3 * torch.randn(len(logprobs_R), generator=generator, dtype=torch.float64)
    advantages_R = torch.randn(len(logprobs_R), generator=generator, dtype=torch.float64)

    def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
        ratio = (logprobs - old_R[rows].to(logprobs.dtype)).exp()
        advantage = advantages_R[rows].to(logprobs.dtype)
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        back = old_R[rows].to(logprobs.dtype) - logprobs
        return (policy + 0.05 * (back.exp() - back - 1) - 0.01 * entropy) / len(old_R)

    return objective


def plain(given: Inputs, objective: Callable[..., Tensor] | None, softcap: float | None) -> tuple[Tensor, ...]:
    """(loss, log-probabilities, entropies, gradients of hidden, weight, bias), float64, the whole table."""
    *leaves, targets = given
    hidden, weight, bias = (x.detach().double().requires_grad_() for x in leaves)
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    table = torch.log_softmax(logits / 0.7, -1)
    rows = (targets != IGNORED).nonzero()[:, 0]
    logprobs, entropy = table[rows, targets[rows]], -(table.exp() * table).sum(-1)[rows]
    objective = objective or clipped_objective(logprobs)
    loss = objective(logprobs, entropy, rows).sum()
    zeros = torch.zeros(len(targets), dtype=torch.float64)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    return loss.detach(), zeros.index_copy(0, rows, logprobs), zeros.index_copy(0, rows, entropy), *gradients


def fused(given: Inputs, objective: TokenObjective, dtype: torch.dtype, **options: object) -> tuple[Tensor, ...]:
    *leaves, targets = given
    hidden, weight, bias = (x.detach().to(dtype).requires_grad_() for x in leaves)
    found = linear_loss(hidden, weight, targets, objective, bias=bias, temperature=0.7, **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(found.loss, (hidden, weight, bias))
    return found.loss.detach(), found.logprobs, found.entropy, *gradients


def with_ignored(given: Inputs) -> Inputs:
    targets = given[3].clone()
    targets[torch.rand(len(targets), generator=torch.Generator().manual_seed(3)) < 0.3] = IGNORED
    return *given[:3], targets


@pytest.mark.parametrize("chunk_size", [1, 7, 100, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_clipped_objective_equals_the_whole_table(
    chunk_size: int | None, softcap: float | None, ignored: bool
) -> None:
    given = with_ignored(inputs()) if ignored else inputs()
    whole = plain(given, lambda logprobs, entropy, rows: logprobs, softcap)
    objective = clipped_objective(whole[1])
    expected = plain(given, objective, softcap)
    found = fused(given, objective, torch.float64, softcap=softcap, chunk_size=chunk_size)
    for our, their in zip(found, expected, strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)


@pytest.mark.parametrize("epilogue", ["eager", "compiled"])
def test_fused_and_split_agree_to_1e5_in_float32(epilogue: str) -> None:
    given = with_ignored(inputs())
    objective = clipped_objective(plain(given, lambda logprobs, entropy, rows: logprobs, None)[1])
    found = fused(given, objective, torch.float32, chunk_size=16, epilogue=epilogue)
    *leaves, targets = given
    hidden, weight, bias = (x.float().requires_grad_() for x in leaves)
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, with_entropy=True, entropy_gradient=True
    )
    assert entropy is not None
    rows = (targets != IGNORED).nonzero()[:, 0]
    loss = objective(logprobs[rows], entropy[rows], rows).sum()
    split = (loss, *torch.autograd.grad(loss, (hidden, weight, bias)))
    for our, their in zip((found[0], *found[3:]), split, strict=True):
        assert float((our - their).detach().norm()) <= 1e-5 * float(their.detach().norm())


def test_rows_without_gradient_are_left_out_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    sizes: list[int] = []
    original = module.add_hidden

    def counted(sum_ND: Tensor, slopes_NC: Tensor, weight_CD: Tensor) -> None:
        sizes.append(slopes_NC.shape[0])
        original(sum_ND, slopes_NC, weight_CD)

    def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
        return logprobs * (rows % 4 == 0)

    monkeypatch.setattr(module, "add_hidden", counted)
    found = fused(given, objective, torch.float64, chunk_size=100)
    assert set(sizes) == {11}
    for our, their in zip(found, plain(given, objective, None), strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)


def test_a_frozen_head_gets_no_gradient_and_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a product for a frozen matrix")

    monkeypatch.setattr("rft_models.logprobs.vocab_slabs.product_tn", refuse)
    found = linear_loss(hidden, weight, targets, lambda logprobs, entropy, rows: logprobs, chunk_size=10)
    (ours,) = torch.autograd.grad(found.loss, (hidden,))
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (hidden,))[0], atol=1e-12, rtol=0)


def test_the_upstream_number_scales_and_a_second_backward_is_refused() -> None:
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_()
    loss = linear_loss(hidden, weight, targets, lambda logprobs, entropy, rows: logprobs).loss
    (once,) = torch.autograd.grad(linear_loss(hidden, weight, targets, lambda p, e, r: p).loss, (hidden,))
    (scaled,) = torch.autograd.grad(loss * -2.5, (hidden,), retain_graph=True)
    torch.testing.assert_close(scaled, once * -2.5)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.grad(loss, (hidden,))


def test_only_ignored_rows_and_no_rows_give_zero() -> None:
    hidden, weight, bias, targets = inputs()
    for given in ((hidden, weight, bias, torch.full_like(targets, IGNORED)), (hidden[:0], weight, bias, targets[:0])):
        loss, logprobs, entropy, *gradients = fused(given, lambda p, e, r: p, torch.float64)
        for values in (loss, logprobs, entropy, *gradients):
            assert (values == 0).all()


def test_without_gradients_only_values_are_computed() -> None:
    given = inputs()
    with torch.no_grad():
        found = linear_loss(*given[:2], given[3], lambda p, e, r: p, bias=given[2], temperature=0.7)
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.loss, plain(given, lambda p, e, r: p, None)[0])


@pytest.mark.parametrize("vocab", [50257, 151936])
@pytest.mark.parametrize("kind", ["flat", "peaked", "negative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabularies_against_float64(vocab: int, kind: str, dtype: torch.dtype) -> None:
    """Both paths; the reference has the rounded inputs too, so that what is left is the rounding of logits."""
    hidden, weight, bias, targets = with_ignored(inputs(rows=24, vocab=vocab, scale={"peaked": 6.0}.get(kind, 0.3)))
    if kind == "peaked":
        targets = torch.where(targets == IGNORED, IGNORED, (hidden @ weight.T).argmax(1))
    bias = torch.full_like(bias, -200.0) if kind == "negative" else torch.zeros_like(bias)
    given = (hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets)
    objective = clipped_objective(plain(given, lambda logprobs, entropy, rows: logprobs, None)[1])
    expected = plain(given, objective, None)
    assert (expected[1] < 0).sum() == (targets != IGNORED).sum()
    # a bfloat16 logit near 200 is rounded by up to half a nat of 1 / temperature
    coarse = {"flat": 2e-2, "peaked": 0.3, "negative": 1.0}[kind]
    logits, gradients = (2e-4, 2e-4) if dtype is torch.float32 else (coarse, 2 * coarse)
    for found in (fused(given, objective, dtype, chunk_size=9), split(given, objective)):
        for our, their in zip(found[1:3], expected[1:3], strict=True):
            assert float((our.detach() - their).abs().max()) <= logits
        for our, their in zip(found[3:], expected[3:], strict=True):
            assert float((our.double() - their).norm()) <= gradients * float(their.norm())


def split(given: Inputs, objective: TokenObjective) -> tuple[Tensor, ...]:
    *leaves, targets = given
    hidden, weight, bias = (x.detach().requires_grad_() for x in leaves)
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, with_entropy=True, entropy_gradient=True, chunk_size=24
    )
    assert entropy is not None
    rows = (targets != IGNORED).nonzero()[:, 0]
    loss = objective(logprobs[rows], entropy[rows], rows).sum()
    shown = torch.where(targets == IGNORED, 0.0, entropy)
    return loss, logprobs, shown, *torch.autograd.grad(loss, (hidden, weight, bias))
