from __future__ import annotations

import math

import pytest
import torch

from rft_kernels.reference.logprobs import selected_logprob_and_entropy


def random_case(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_rows, vocab_size, dtype=torch.float64, generator=generator)
    return logits, torch.randint(0, vocab_size, (num_rows,), generator=generator)


def test_hand_computed_values():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]], dtype=torch.float64)
    logprobs, entropy, lse = selected_logprob_and_entropy(logits, torch.tensor([0, 1]), 1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.5)])
    assert entropy.tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2)])
    assert lse.tolist() == pytest.approx([math.log(4.0), 5 + math.log(2)])


def test_temperature_divides_the_logits():
    logits, targets = random_case(4, 9)
    for cold, scaled in zip(
        selected_logprob_and_entropy(logits, targets, 0.4),
        selected_logprob_and_entropy(logits / 0.4, targets, 1.0),
        strict=True,
    ):
        torch.testing.assert_close(cold, scaled, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("output", range(3))
def test_each_gradient_is_right(temperature: float, output: int):
    logits, targets = random_case(3, 7)
    assert torch.autograd.gradcheck(
        lambda x: selected_logprob_and_entropy(x, targets, temperature)[output], (logits.requires_grad_(),)
    )


def test_equals_log_softmax_in_value_and_in_the_gradient_of_all_three_results():
    logits, targets = random_case(5, 11)
    coefficients = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf / 0.7, -1)
    expected = (
        log_probs.gather(-1, targets[:, None])[:, 0],
        -(log_probs.exp() * log_probs).sum(-1),
        torch.logsumexp(leaf / 0.7, -1),
    )
    sum((c * e).sum() for c, e in zip(coefficients, expected, strict=True)).backward()

    again = logits.clone().requires_grad_()
    found = selected_logprob_and_entropy(again, targets, 0.7)
    sum((c * f).sum() for c, f in zip(coefficients, found, strict=True)).backward()
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again.grad, leaf.grad, rtol=1e-11, atol=1e-13)


def test_forbidden_tokens_make_no_nan():
    logits = torch.tensor([[1.0, -math.inf, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy, lse = selected_logprob_and_entropy(logits, torch.tensor([2]), 0.5)
    (logprobs + entropy + lse).sum().backward()
    p = 1 / (1 + math.exp(2.0))
    assert float(entropy.detach()) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[0, [1, 3]].tolist() == [0.0, 0.0]


def test_the_logits_are_left_as_they_were():
    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.bfloat16, 1.0)):
        logits = random_case(3, 6)[0].to(dtype).requires_grad_()
        before = logits.detach().clone()
        selected_logprob_and_entropy(logits, torch.tensor([0, 1, 2]), temperature)[0].sum().backward()
        assert torch.equal(logits.detach(), before)
        assert logits.grad is not None
        assert logits.grad.dtype == dtype


def test_temperature_zero_is_refused():
    with pytest.raises(AssertionError, match="positive"):
        selected_logprob_and_entropy(torch.zeros(1, 2), torch.tensor([0]), 0.0)
