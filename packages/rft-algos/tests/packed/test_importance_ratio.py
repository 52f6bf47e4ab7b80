from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.packed.importance_ratio import log_ratio, ratio
from rft_algos.surrogates import LOG_RATIO_LIMIT, is_clamped, ppo_clip, ppo_clipped

TOKENS = st.lists(st.tuples(st.floats(-30, 30), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_ppo(log_ratio: float, advantage: float, low: float, high: float) -> float:
    r = math.exp(max(-20.0, min(20.0, log_ratio)))
    return -min(advantage * r, advantage * max(1 - low, min(1 + high, r)))


def test_hand_computed_values_on_both_sides_of_the_clip():
    log_ratios = doubles(1.5, 1.1, 0.5, 1.5, 0.5).log()
    advantages = doubles(2.0, 2.0, 2.0, -2.0, -2.0)
    # min(A r, A clip(r, 0.8, 1.3)): 2 * 1.3, 2 * 1.1, 2 * 0.5, -2 * 1.5, -2 * 0.8
    losses = ppo_clip(log_ratios, advantages, 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-2.6, -2.2, -1.0, 3.0, 1.6], rel=1e-12)
    assert ppo_clipped(log_ratios, advantages, 0.2, 0.3).tolist() == [True, False, False, False, True]


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 5.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float]], low: float, high: float):
    log_ratios, advantages = doubles(*[x for x, _ in tokens]), doubles(*[a for _, a in tokens])
    expected = [plain_ppo(x, a, low, high) for x, a in tokens]
    assert ppo_clip(log_ratios, advantages, low, high).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(TOKENS)
def test_the_clip_indicator_is_where_the_gradient_is_zero(tokens: list[tuple[float, float]]):
    log_ratios = doubles(*[max(-19.0, min(19.0, x)) for x, _ in tokens]).requires_grad_()
    advantages = doubles(*[a if abs(a) > 1e-3 else 1.0 for _, a in tokens])
    ppo_clip(log_ratios, advantages, 0.2, 0.28).sum().backward()
    assert log_ratios.grad is not None
    assert (log_ratios.grad == 0).tolist() == ppo_clipped(log_ratios, advantages, 0.2, 0.28).tolist()


def test_at_the_old_policy_value_and_gradient_are_minus_the_advantage():
    log_ratios, advantages = doubles(0.0, 0.0, 0.0).requires_grad_(), doubles(1.5, -0.5, 0.0)
    losses = ppo_clip(log_ratios, advantages, 0.2, 0.2)
    losses.sum().backward()
    assert losses.tolist() == [-1.5, 0.5, 0.0]
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == [-1.5, 0.5, 0.0]


def test_without_reach_of_the_clip_it_is_importance_sampling():
    log_ratios, advantages = doubles(-1.0, 0.3, 1.0), doubles(1.0, -2.0, 0.5)
    assert torch.equal(ppo_clip(log_ratios, advantages, 1 - 1e-9, 1e9), -advantages * log_ratios.exp())


def test_gradient_is_right():
    log_ratios = torch.linspace(-1.03, 1.03, 15, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        advantages = torch.full((15,), sign * 1.7, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, a=advantages: ppo_clip(x, a, 0.2, 0.28), (log_ratios,))


@pytest.mark.parametrize("extreme", [1e3, -1e3, 1e30, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_give_finite_values_and_zero_gradients(extreme: float, advantage: float):
    log_ratios = torch.tensor([extreme], requires_grad=True)
    loss = ppo_clip(log_ratios, torch.tensor([advantage]), 0.2, 0.2)
    loss.sum().backward()
    assert log_ratios.grad is not None
    assert bool(loss.isfinite().all())
    assert log_ratios.grad.tolist() == [0.0]
    assert is_clamped(log_ratios.detach()).tolist() == [True]


def test_a_nan_is_not_hidden_by_the_clamp():
    assert bool(ratio(torch.tensor([math.nan])).isnan().all())


def test_the_clamp_is_at_exactly_twenty():
    log_ratios = doubles(-LOG_RATIO_LIMIT - 1e-9, -LOG_RATIO_LIMIT, 0.0, LOG_RATIO_LIMIT, LOG_RATIO_LIMIT + 1e-9)
    assert LOG_RATIO_LIMIT == 20.0
    assert is_clamped(log_ratios).tolist() == [True, False, False, False, True]
    assert ratio(log_ratios).tolist() == [math.exp(-20), math.exp(-20), 1.0, math.exp(20), math.exp(20)]


INF = torch.inf


def test_a_token_without_probability_has_a_log_ratio_of_0_and_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -INF, -INF, -2.0, -3.0], dtype=torch.float64).requires_grad_()
    old = torch.tensor([-1.5, -INF, -1.0, -INF, -3.5], dtype=torch.float64).requires_grad_()
    found = log_ratio(logprobs, old)
    assert found.tolist() == [0.5, 0.0, 0.0, 0.0, 0.5]
    (found * torch.arange(1.0, 6.0)).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 5.0]
    assert old.grad is None


def test_nan_and_infinity_are_faults_and_stay() -> None:
    found = log_ratio(torch.tensor([torch.nan, INF]), torch.tensor([0.0, 0.0]))
    assert found.isnan().tolist() == [True, False]
    assert found[1] == INF
