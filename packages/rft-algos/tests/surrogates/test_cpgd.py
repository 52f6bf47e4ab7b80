from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.losses import kl
from rft_algos.surrogates import cpgd, cpgd_clipped, policy_drift, ppo_clipped, reinforce

TOKENS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    if advantage > 0:
        return -advantage * min(logprob, old + math.log(1 + high))
    return -advantage * max(logprob, old + math.log(1 - low))


def plain_drift(log_ratio: float, limit: float) -> float:
    if math.exp(min(log_ratio, 600.0)) <= 1 + limit:
        return math.exp(log_ratio) - 1 - log_ratio
    return limit - math.log(1 + limit) + limit * (log_ratio - math.log(1 + limit))


def test_hand_computed_values():
    old, advantages = doubles(-1.0, -1.0, -1.0, -1.0, -1.0), doubles(2.0, 2.0, -3.0, -3.0, 0.0)
    logprobs = doubles(-0.5, -2.0, -0.5, -2.0, -0.5)
    # log 1.3 = 0.262364264467491, log 0.8 = -0.223143551314210
    # -2 (-1 + 0.2624), -2 * -2, 3 * -0.5, 3 (-1 - 0.2231), 0
    expected = [1.475271471065018, 4.0, -1.5, -3.669430653942629, 0.0]
    assert cpgd(logprobs, old, advantages, 0.2, 0.3).tolist() == pytest.approx(expected, rel=1e-12)
    assert cpgd_clipped(logprobs, old, advantages, 0.2, 0.3).tolist() == [True, False, False, True, False]


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 5.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float, float]], low: float, high: float):
    logprobs, old, advantages = (doubles(*[token[i] for token in tokens]) for i in range(3))
    expected = [plain(*token, low, high) for token in tokens]
    assert cpgd(logprobs, old, advantages, low, high).tolist() == pytest.approx(expected, rel=1e-11, abs=1e-14)


@given(TOKENS)
def test_its_gradient_is_that_of_reinforce_or_nothing(tokens: list[tuple[float, float, float]]):
    logprobs, old, advantages = (doubles(*[token[i] for token in tokens]) for i in range(3))
    leaf = logprobs.clone().requires_grad_()
    cpgd(leaf, old, advantages, 0.2, 0.28).sum().backward()
    clipped = cpgd_clipped(logprobs, old, advantages, 0.2, 0.28)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.where(clipped, 0.0, -advantages))


def test_it_clips_where_ppo_does():
    old = torch.full((400,), -2.0, dtype=torch.float64)
    logprobs = torch.linspace(-3, -1, 400, dtype=torch.float64)
    for advantage in (1.0, -1.0):
        advantages = torch.full((400,), advantage, dtype=torch.float64)
        expected = ppo_clipped(logprobs - old, advantages, 0.2, 0.3)
        assert torch.equal(cpgd_clipped(logprobs, old, advantages, 0.2, 0.3), expected)
        assert 0 < int(expected.sum()) < 400


def test_exactly_at_the_bound_the_token_still_learns():
    old = doubles(-1.0, -1.0)
    logprobs = (old + doubles(math.log1p(0.3), math.log1p(-0.2))).requires_grad_()
    cpgd(logprobs, old, doubles(1.0, -1.0), 0.2, 0.3).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 1.0]
    assert cpgd_clipped(logprobs.detach(), old, doubles(1.0, -1.0), 0.2, 0.3).tolist() == [False, False]


def test_the_clip_is_not_differentiated():
    waiting, names = [cpgd(doubles(-1.0).requires_grad_(), doubles(-1.0), doubles(1.0), 0.2, 0.2).grad_fn], set[str]()
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [parent for parent, _ in node.next_functions]
    assert not [name for name in names if "Minimum" in name or "Maximum" in name]


def test_at_the_old_policy_it_is_reinforce():
    old, advantages = doubles(-1.0, -0.5, -3.0), doubles(1.0, -2.0, 0.0)
    assert torch.equal(cpgd(old, old, advantages, 0.2, 0.2), reinforce(old, advantages))


def test_a_nan_is_not_hidden():
    found = cpgd(doubles(math.nan, math.nan), doubles(-1.0, -1.0), doubles(1.0, -1.0), 0.2, 0.2)
    assert bool(found.isnan().all())


def test_drift_by_hand_on_both_sides_of_the_limit():
    # r = 2: 2 - 1 - log 2; r = 1/2: 1/2 - 1 + log 2; r = 9, limit 2: 2 - log 3 + 2 (log 9 - log 3) = 2 + log 3
    x = doubles(2.0, 0.5, 9.0, 1.0).log()
    expected = [1 - math.log(2), math.log(2) - 0.5, 2 + math.log(3), 0.0]
    assert policy_drift(x).tolist() == pytest.approx(expected, rel=1e-12)
    assert inspect.signature(policy_drift).parameters["limit"].default == 2.0


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.floats(0.1, 5.0))
def test_drift_equals_a_plain_twin(log_ratios: list[float], limit: float):
    found = policy_drift(doubles(*log_ratios), limit=limit).tolist()
    assert found == pytest.approx([plain_drift(x, limit) for x in log_ratios], rel=1e-9, abs=1e-14)
    assert min(found) >= 0


def test_drift_pulls_with_the_ratio_up_to_its_limit_and_never_stops():
    x = doubles(-1e3, -1.0, 0.0, 1.0, math.log(3.0), 2.0, 50.0, 1e3).requires_grad_()
    policy_drift(x).sum().backward()
    assert x.grad is not None
    expected = [-1.0, math.exp(-1) - 1, 0.0, math.e - 1, 2.0, 2.0, 2.0, 2.0]
    assert x.grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_drift_averages_to_the_divergence_from_the_old_policy_and_so_does_its_gradient():
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    old, leaf = torch.log_softmax(logits[1], -1), logits[0].clone().requires_grad_()
    x = torch.log_softmax(leaf, -1) - old
    drift, divergence = (old.exp() * policy_drift(x, limit=1e3)).sum(), -(old.exp() * x).sum()
    assert float(drift.detach()) == pytest.approx(float(divergence.detach()), rel=1e-12)
    found, expected = torch.autograd.grad(drift, leaf, retain_graph=True), torch.autograd.grad(divergence, leaf)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_below_the_limit_drift_is_k3_of_the_opposite_direction():
    x = torch.linspace(-3, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(policy_drift(x), kl.k3(-x), rtol=1e-12, atol=1e-16)


def test_drift_keeps_its_digits_near_zero():
    assert float(policy_drift(torch.tensor([1e-3]))) == pytest.approx(5.001667e-7, rel=1e-3)


def test_gradients_are_right():
    logprobs = torch.linspace(-3, -0.1, 9, dtype=torch.float64, requires_grad=True)
    old = torch.full((9,), -1.3, dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = torch.full((9,), sign * 1.7, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, a=advantages: cpgd(x, old, a, 0.2, 0.3), (logprobs,))
    assert torch.autograd.gradcheck(policy_drift, (torch.linspace(-3, 3, 9, dtype=torch.float64, requires_grad=True),))


def test_a_limit_that_makes_no_sense_is_refused():
    with pytest.raises(InputError, match=r"limit must be positive, it is 0\.0"):
        policy_drift(doubles(0.0), limit=0.0)


def test_a_token_of_advantage_zero_is_not_clipped():
    assert cpgd_clipped(doubles(-0.1, -9.0), doubles(-2.0, -2.0), doubles(0.0, 0.0), 0.2, 0.2).tolist() == [False] * 2
