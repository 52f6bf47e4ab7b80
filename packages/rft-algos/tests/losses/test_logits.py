from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.losses import logits as module
from rft_algos.losses.logits import entropy_from_logits, logprobs_from_logits

D = torch.float64


@pytest.fixture(params=[1, 12, 2**24], ids=["a row a chunk", "two rows a chunk", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", request.param)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 6, dtype=D, generator=generator) * 3, torch.tensor([0, 5, 2, 2, 1])


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_those_of_sums_written_out(temperature: float) -> None:
    logits, ids = inputs()
    for t, (row, token) in enumerate(zip((logits / temperature).tolist(), ids.tolist(), strict=True)):
        total = math.fsum(math.exp(x) for x in row)
        probabilities = [math.exp(x) / total for x in row]
        found = logprobs_from_logits(logits, ids, temperature=temperature)[t]
        assert float(found) == pytest.approx(math.log(probabilities[token]), rel=1e-12)
        entropy = -math.fsum(p * math.log(p) for p in probabilities)
        assert float(entropy_from_logits(logits, temperature=temperature)[t]) == pytest.approx(entropy, rel=1e-12)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_exact(temperature: float) -> None:
    logits, ids = inputs()
    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, ids, temperature=temperature), (leaf,))
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, temperature=temperature), (leaf,))


@pytest.mark.usefixtures("chunk")
def test_forbidden_tokens_add_nothing() -> None:
    logits, ids = inputs()
    logits[:, 3] = -math.inf
    leaf = logits.clone().requires_grad_()
    without = logits[:, [0, 1, 2, 4, 5]].clone().requires_grad_()
    for found, expected in (
        (entropy_from_logits(leaf), entropy_from_logits(without)),
        (logprobs_from_logits(leaf, ids), logprobs_from_logits(without, torch.tensor([0, 4, 2, 2, 1]))),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
        (other,) = torch.autograd.grad(expected.sum(), without)
        torch.testing.assert_close(gradient[:, [0, 1, 2, 4, 5]], other, rtol=1e-12, atol=1e-15)
        assert bool((gradient[:, 3] == 0).all())
    assert logprobs_from_logits(logits, torch.full((5,), 3)).tolist() == [-math.inf] * 5


def test_half_types_are_summed_in_float32_and_rows_keep_their_shape() -> None:
    logits = (torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(1)) * 4).bfloat16().requires_grad_()
    ids = torch.tensor([[0, 1, 2], [3, 4, 4999]])
    found, exact = logprobs_from_logits(logits, ids), torch.log_softmax(logits.double(), -1)
    assert (found.dtype, found.shape) == (torch.float32, (2, 3))
    torch.testing.assert_close(found.double(), exact.gather(2, ids[..., None])[..., 0], rtol=1e-6, atol=1e-6)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum() + entropy.sum(), logits)
    assert gradient.dtype == torch.bfloat16


def test_traced_code_gives_the_same() -> None:
    logits, ids = inputs()

    def loss(x: Tensor) -> Tensor:
        return (logprobs_from_logits(x, ids, temperature=0.7) + entropy_from_logits(x)).sum()

    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(logits), expected, rtol=1e-12, atol=1e-14)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits), loss(logits), rtol=1e-12, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    logits, ids = inputs()
    with pytest.raises(InputError, match="one row a token"):
        logprobs_from_logits(logits, ids[:3])
    with pytest.raises(InputError, match="temperature must be positive"):
        entropy_from_logits(logits, temperature=0.0)
    with pytest.raises(InputError, match="floating rows"):
        entropy_from_logits(logits.long())


def test_of_a_large_vocabulary_one_row_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5)
    widened: list[int] = []
    wide = module._wide

    def counted(rows: Tensor) -> Tensor:
        widened.append(rows.shape[0])
        return wide(rows)

    monkeypatch.setattr(module, "_wide", counted)
    logprobs_from_logits(*inputs())
    assert widened == [1] * 5
