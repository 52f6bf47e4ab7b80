from __future__ import annotations

import math

import pytest
import torch

from rft_algos.surrogates import importance_weighted, ppo_clip, reinforce


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_hand_computed_values():
    # -2 * -1.5, 3 * -0.5, 0
    assert reinforce(doubles(-1.5, -0.5, -1.0), doubles(2.0, -3.0, 0.0)).tolist() == [3.0, -1.5, 0.0]
    found = importance_weighted(doubles(2.0, 0.5).log(), doubles(3.0, -4.0))  # -3 * 2, 4 * 0.5
    assert found.tolist() == pytest.approx([-6.0, 2.0], rel=1e-12)


def test_equals_a_plain_twin():
    numbers = torch.Generator().manual_seed(0)
    x = 15 * torch.randn(200, dtype=torch.float64, generator=numbers)
    a = torch.randn(200, dtype=torch.float64, generator=numbers)
    pairs = list(zip(x.tolist(), a.tolist(), strict=True))
    assert reinforce(x, a).tolist() == pytest.approx([-w * v for v, w in pairs], rel=1e-12)
    expected = [-w * math.exp(max(-20.0, min(20.0, v))) for v, w in pairs]
    assert importance_weighted(x, a).tolist() == pytest.approx(expected, rel=1e-12)


def test_importance_weights_are_ppo_without_a_clip():
    x, a = doubles(-1.0, 0.3, 1.0), doubles(1.0, -2.0, 0.5)
    assert torch.equal(importance_weighted(x, a), ppo_clip(x, a, 1 - 1e-9, 1e9))


def test_importance_weights_average_to_the_policy_gradient_whoever_sampled():
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 7, dtype=torch.float64, generator=numbers)
    advantages = torch.randn(7, dtype=torch.float64, generator=numbers)
    behaviour = torch.log_softmax(logits[1], -1)

    def gradient(off_policy: bool) -> torch.Tensor:
        leaf = logits[0].clone().requires_grad_()
        logprobs = torch.log_softmax(leaf, -1)
        if off_policy:
            (behaviour.exp() * importance_weighted(logprobs - behaviour, advantages)).sum().backward()
        else:
            (logprobs.detach().exp() * reinforce(logprobs, advantages)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-12, atol=1e-15)


def test_gradients_are_right():
    x = torch.linspace(-3, 2, 9, dtype=torch.float64, requires_grad=True)
    a = torch.linspace(-1, 1.3, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: reinforce(y, a), (x,))
    assert torch.autograd.gradcheck(lambda y: importance_weighted(y, a), (x,))
