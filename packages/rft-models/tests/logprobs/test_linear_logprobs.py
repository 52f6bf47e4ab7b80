"""Slabs of the vocabulary against the whole table, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_models.logprobs import linear_logprobs as module
from rft_models.logprobs.linear_logprobs import linear_logprobs


def inputs(rows: int = 7, width: int = 5, vocab: int = 23, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, vocab, (rows,), generator=generator)


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    table = torch.log_softmax(logits / temperature, -1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("slab_size", [1, 4, 22, 1000, None])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_chunk_size_equals_the_whole_table(
    chunk_size: int | None, slab_size: int | None, softcap: float | None, with_bias: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    maybe_bias = bias if with_bias else None
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    expected, expected_entropy = naive(hidden, weight, maybe_bias, targets, 0.7, softcap)
    found, entropy = linear_logprobs(
        hidden,
        weight,
        targets,
        bias=maybe_bias,
        temperature=0.7,
        softcap=softcap,
        chunk_size=chunk_size,
        slab_size=slab_size,
        with_entropy=True,
        entropy_gradient=True,
    )
    assert entropy is not None
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    upstream = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours = torch.autograd.grad((found * upstream + entropy * upstream.flip(0)).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream + expected_entropy * upstream.flip(0)).sum(), leaves)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_agree_with_finite_differences(softcap: float | None) -> None:
    hidden, weight, bias, targets = inputs(rows=3, width=2, vocab=5)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=1.3,
            softcap=softcap,
            chunk_size=2,
            slab_size=2,
            with_entropy=True,
            entropy_gradient=True,
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("chunk_size", [3, None])
def test_entropy_is_detached_unless_asked(chunk_size: int | None) -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropy = linear_logprobs(hidden, weight, targets, chunk_size=chunk_size, with_entropy=True)
    assert entropy is not None
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("shift", [-3000.0, -120.0, 0.0, 120.0, 3000.0])
def test_shifted_logits_stay_finite_and_equal(shift: float) -> None:
    hidden, weight, _, targets = inputs()
    bias = torch.full((23,), shift, dtype=torch.float32)
    given = (hidden.detach().float(), weight.detach().float(), targets)
    plain, _ = linear_logprobs(*given, slab_size=4)
    shifted, _ = linear_logprobs(*given, bias=bias, slab_size=4)
    torch.testing.assert_close(shifted, plain, atol=2e-3 if shift else 0.0, rtol=0)


@pytest.mark.parametrize("slab_size", [4, None])
def test_large_logits_cost_no_digits(slab_size: int | None) -> None:
    hidden, weight, _, targets = inputs()
    given = ((hidden * 1000).detach(), weight.detach())
    expected, expected_entropy = naive(*given, None, targets, 500.0, None)
    found, entropy = linear_logprobs(
        *(tensor.float() for tensor in given), targets, temperature=500.0, slab_size=slab_size, with_entropy=True
    )
    torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=0)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=3e-6, rtol=0)


@pytest.mark.parametrize("slab_size", [4, None])
def test_rows_without_upstream_gradient_cost_and_change_nothing(slab_size: int | None) -> None:
    hidden, weight, _, targets = inputs()
    upstream = torch.tensor([0.0, 2.0, 0.0, 0.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    found, _ = linear_logprobs(hidden, weight, targets, slab_size=slab_size)
    expected, _ = naive(hidden, weight, None, targets, 1.0, None)
    ours = torch.autograd.grad(found, (hidden, weight), upstream)
    theirs = torch.autograd.grad(expected, (hidden, weight), upstream)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)
    assert (ours[0][upstream == 0] == 0).all()


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    hidden, weight, _, targets = inputs()
    found, _ = linear_logprobs(hidden, weight.detach(), targets, slab_size=4)
    (ours,) = torch.autograd.grad(found.sum(), (hidden,))
    (theirs,) = torch.autograd.grad(naive(hidden, weight, None, targets, 1.0, None)[0].sum(), (hidden,))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk_size", [4, None])
def test_no_rows_give_an_empty_result_with_zero_gradients(chunk_size: int | None) -> None:
    hidden, weight, _, _ = inputs()
    found, _ = linear_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.int64), chunk_size=chunk_size)
    assert found.shape == (0,)
    (gradient,) = torch.autograd.grad(found.sum(), (weight,))
    assert (gradient == 0).all()


def test_a_large_table_is_cut_by_size_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_LOGITS", 100)
    monkeypatch.setattr(module, "_MIN_SLAB", 3)
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", 35)
    hidden, weight, bias, targets = inputs()
    found, _ = linear_logprobs(hidden, weight, targets, bias=bias)
    torch.testing.assert_close(found, naive(hidden, weight, bias, targets, 1.0, None)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_kept_probabilities_of_several_slabs_give_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool
) -> None:
    monkeypatch.setattr(module, "_MIN_SLAB", 4)
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", 35)
    hidden, weight, bias, targets = inputs()
    found, entropy = linear_logprobs(
        hidden, weight, targets, bias=bias, temperature=0.7, with_entropy=True, entropy_gradient=entropy_gradient
    )
    expected, expected_entropy = naive(hidden, weight, bias, targets, 0.7, None)
    assert entropy is not None
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours, theirs = (found * weights).sum(), (expected * weights).sum()
    if entropy_gradient:
        ours, theirs = ours + (entropy * weights.flip(0)).sum(), theirs + (expected_entropy * weights.flip(0)).sum()
    leaves = (hidden, weight, bias)
    for our, their in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)


def test_bfloat16_results_are_float32() -> None:
    hidden, weight, _, targets = inputs()
    found, _ = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, slab_size=4)
    assert found.dtype is torch.float32
