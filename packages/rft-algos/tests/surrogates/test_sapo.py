from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.surrogates import sapo

TOKENS = st.lists(st.tuples(st.floats(-30, 30), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(log_ratio: float, advantage: float, positive: float, negative: float) -> float:
    tau = positive if advantage > 0 else negative
    z = tau * (math.exp(max(-20.0, min(20.0, log_ratio))) - 1)
    gate = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
    return -advantage * 4 / tau * gate


def test_hand_computed_values():
    # r = 2: -3 * 4 / 1 * sigmoid(1) = -12 * 0.731058578630005; A < 0: 2 * 4 / 1.05 * sigmoid(1.05)
    found = sapo(doubles(2.0, 2.0).log(), doubles(3.0, -2.0))
    assert found.tolist() == pytest.approx([-12 * 0.7310585786300049, 8 / 1.05 * 0.7407748991821539], rel=1e-12)
    # at the old policy: -A * 2 / tau
    assert sapo(doubles(0.0, 0.0), doubles(3.0, -2.1)).tolist() == pytest.approx([-6.0, 4.0], rel=1e-12)
    assert sapo(doubles(0.0), doubles(0.0)).tolist() == [0.0]


def test_the_temperatures_are_those_of_the_paper_by_default():
    parameters = inspect.signature(sapo).parameters
    assert (parameters["tau_positive"].default, parameters["tau_negative"].default) == (1.0, 1.05)


@given(TOKENS, st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float]], positive: float, negative: float):
    log_ratios, advantages = doubles(*[x for x, _ in tokens]), doubles(*[a for _, a in tokens])
    expected = [plain(x, a, positive, negative) for x, a in tokens]
    assert sapo(log_ratios, advantages, positive, negative).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_the_temperatures_keep_all_their_digits():
    # two plain floats in a `where` would be float32: 1.05 would be off by 4e-8
    found = float(sapo(doubles(0.0), doubles(-1.0)))
    assert found == pytest.approx(2 / 1.05, rel=1e-15)


def test_the_gate_fades_out_on_both_sides_and_never_flips_its_sign():
    log_ratios = doubles(-10.0, -1.0, 0.0, 1.0, 3.0).requires_grad_()
    sapo(log_ratios, doubles(1.0, 1.0, 1.0, 1.0, 1.0)).sum().backward()
    gradient = log_ratios.grad
    assert gradient is not None
    assert bool((gradient <= 0).all())
    assert float(gradient[2]) == -1.0
    assert float(gradient[0].abs()) < 1e-4
    assert float(gradient[4].abs()) < 1e-5


def test_gradients_are_right():
    log_ratios = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        advantages = torch.full((9,), sign * 1.7, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, a=advantages: sapo(x, a, 1.0, 2.0), (log_ratios,))
