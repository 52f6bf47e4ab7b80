from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.surrogates import cispo, cispo_clipped, reinforce

TOKENS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-30, 30), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(logprob: float, log_ratio: float, advantage: float, low: float | None, high: float) -> float:
    r = math.exp(max(-20.0, min(20.0, log_ratio)))
    lower = 0.0 if low is None else 1 - low
    return -max(lower, min(1 + high, r)) * advantage * logprob


def test_hand_computed_values():
    logprobs, advantages = doubles(-2.0, -2.0, -2.0), doubles(3.0, 3.0, -1.0)
    log_ratios = doubles(8.0, 0.25, 1.5).log()
    # -min(8, 5) * 3 * -2, -0.25 * 3 * -2, -1.5 * -1 * -2
    assert cispo(logprobs, log_ratios, advantages, None, 4.0).tolist() == pytest.approx([30.0, 1.5, -3.0], rel=1e-12)
    # with a lower bound of 0.5
    assert cispo(logprobs, log_ratios, advantages, 0.5, 4.0).tolist() == pytest.approx([30.0, 3.0, -3.0], rel=1e-12)
    assert cispo_clipped(log_ratios, None, 4.0).tolist() == [True, False, False]
    assert cispo_clipped(log_ratios, 0.5, 4.0).tolist() == [True, True, False]


@given(TOKENS, st.one_of(st.none(), st.floats(0.05, 1.0)), st.floats(0.05, 8.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float, float]], low: float | None, high: float):
    logprobs, log_ratios, advantages = (doubles(*[token[i] for token in tokens]) for i in range(3))
    expected = [plain(*token, low, high) for token in tokens]
    assert cispo(logprobs, log_ratios, advantages, low, high).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_a_clipped_token_keeps_its_gradient_and_the_weight_has_none():
    logprobs = doubles(-1.0, -1.0).requires_grad_()
    log_ratios = doubles(5.0, 0.5).requires_grad_()
    cispo(logprobs, log_ratios, doubles(2.0, 2.0), 0.2, 1.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-4.0, -2 * math.exp(0.5)])
    assert log_ratios.grad is None


def test_exactly_at_the_bounds_nothing_is_clipped():
    log_ratios = doubles(math.log(2.0), -math.log(2.0))  # 2 and 0.5, exactly
    assert log_ratios.exp().tolist() == [2.0, 0.5]
    assert cispo_clipped(log_ratios, 0.5, 1.0).tolist() == [False, False]
    assert cispo_clipped(log_ratios, 0.4, 0.9).tolist() == [True, True]


def test_at_the_old_policy_it_is_reinforce():
    logprobs, advantages = doubles(-1.0, -0.5), doubles(2.0, -3.0)
    found = cispo(logprobs, doubles(0.0, 0.0), advantages, None, 4.0)
    assert torch.equal(found, reinforce(logprobs, advantages))


@pytest.mark.parametrize(("extreme", "weight"), [(math.inf, 5.0), (-math.inf, math.exp(-20)), (1e30, 5.0)])
def test_extreme_ratios_give_a_bounded_weight(extreme: float, weight: float):
    found = cispo(doubles(-1.0), doubles(extreme), doubles(1.0), None, 4.0)
    assert found.tolist() == pytest.approx([weight], rel=1e-12)


def test_gradients_are_right():
    logprobs = torch.linspace(-3, -0.1, 9, dtype=torch.float64, requires_grad=True)
    log_ratios = torch.linspace(-2, 2, 9, dtype=torch.float64)
    advantages = torch.linspace(-1, 1.3, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: cispo(x, log_ratios, advantages, 0.5, 1.0), (logprobs,))
