from __future__ import annotations

import torch

from rft_algos.reductions import token_mean, weighted_sum
from rft_algos.supervised import negative_log_likelihood


def test_with_token_mean_it_is_torch_cross_entropy_in_value_and_gradient():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 5, (7,), generator=generator)
    mask = torch.tensor([True, False, True, True, False, True, True])

    expected = torch.nn.functional.cross_entropy(logits, torch.where(mask, targets, -100))
    (expected_grad,) = torch.autograd.grad(expected, logits)
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    loss = weighted_sum(token_mean(mask, 5, dtype=torch.float64), negative_log_likelihood(logprobs))
    (grad,) = torch.autograd.grad(loss, logits)

    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)


def test_it_is_minus_the_log_prob():
    assert negative_log_likelihood(torch.tensor([-0.5, -2.0, 0.0])).tolist() == [0.5, 2.0, 0.0]
