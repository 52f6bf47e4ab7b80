from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.losses import kl
from rft_algos.surrogates import decoupled_ppo, dro, ppo_clip, reinforce, squared_log_ratio

TOKENS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-25, 25), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_hand_computed_values():
    assert squared_log_ratio(doubles(3.0, -2.0, 0.0)).tolist() == [4.5, 2.0, 0.0]
    # 2 * 1 + 0.5 / 2 * 9, -3 * 2 + 0.25 * 4
    assert dro(doubles(-1.0, -2.0), doubles(3.0, -2.0), doubles(2.0, -3.0), 0.5).tolist() == [4.25, -5.0]
    # 0.5 * -2 * 1.2 (clipped), 2 * 3 * 1.5
    found = decoupled_ppo(doubles(1.5, 1.5).log(), doubles(2.0, -3.0), doubles(0.5, 2.0), 0.2, 0.2)
    assert found.tolist() == pytest.approx([-1.2, 9.0], rel=1e-12)


@given(TOKENS, st.floats(0.01, 3.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float, float]], tau: float):
    logprobs, log_ratios, advantages = (doubles(*[token[i] for token in tokens]) for i in range(3))
    expected = [-a * lp + tau * x * x / 2 for lp, x, a in tokens]
    assert dro(logprobs, log_ratios, advantages, tau).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    weights = logprobs.exp()
    expected = [
        math.exp(lp) * -min(a * (r := math.exp(max(-20.0, min(20.0, x)))), a * max(0.8, min(1.28, r)))
        for lp, x, a in tokens
    ]
    found = decoupled_ppo(log_ratios, advantages, weights, 0.2, 0.28)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_the_penalty_is_k2_and_its_pull_grows_without_end():
    x = doubles(-1e3, -0.5, 0.0, 2.0, 1e3).requires_grad_()
    values = squared_log_ratio(x)
    values.sum().backward()
    assert x.grad is not None
    assert torch.equal(values, kl.k2(x))
    assert torch.equal(x.grad, x.detach())


def test_dro_has_the_gradient_of_the_squared_error_over_tau():
    # d/dx (A - tau x)^2 / 2 = -tau (A - tau x)
    logprobs = doubles(-1.0, -2.0, -0.3).requires_grad_()
    old, advantages, tau = doubles(-1.4, -1.0, -0.3), doubles(1.0, -2.0, 0.4), 0.7
    (found,) = torch.autograd.grad(dro(logprobs, logprobs - old, advantages, tau).sum(), logprobs)
    errors = (advantages - tau * (logprobs - old)).square().sum() / 2
    (expected,) = torch.autograd.grad(errors, logprobs)
    torch.testing.assert_close(found, expected / tau, rtol=1e-12, atol=1e-15)


def test_dro_without_penalty_is_reinforce():
    logprobs, advantages = doubles(-1.0, -2.0), doubles(1.5, -1.0)
    assert torch.equal(dro(logprobs, doubles(3.0, 4.0), advantages, 0.0), reinforce(logprobs, advantages))


def test_decoupled_ppo_with_equal_policies_is_ppo_and_its_weight_has_no_gradient():
    x, a, w = doubles(0.5, -0.1).requires_grad_(), doubles(1.0, -1.0), doubles(1.0, 1.0).requires_grad_()
    losses = decoupled_ppo(x, a, w, 0.2, 0.2)
    losses.sum().backward()
    assert torch.equal(losses, ppo_clip(x, a, 0.2, 0.2))
    assert w.grad is None


def test_gradients_are_right():
    x = torch.linspace(-1.03, 1.03, 8, dtype=torch.float64, requires_grad=True)
    a, w = torch.linspace(-1, 1.3, 8, dtype=torch.float64), torch.linspace(0.3, 2, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(squared_log_ratio, (x,))
    assert torch.autograd.gradcheck(lambda y: dro(y, y - 0.3, a, 0.7), (x,))
    assert torch.autograd.gradcheck(lambda y: decoupled_ppo(y, a, w, 0.2, 0.28), (x,))
