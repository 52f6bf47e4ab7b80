from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rft_algos.algorithms.published import KlEstimator
from rft_algos.losses import kl


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def two_policies() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    return logits[0], torch.log_softmax(logits[1], -1)


def test_hand_computed_values():
    x = doubles(0.0, math.log(2.0), -math.log(2.0))
    assert kl.k1(x).tolist() == pytest.approx([0.0, 0.693147180559945, -0.693147180559945])
    assert kl.k2(x).tolist() == pytest.approx([0.0, 0.240226506959101, 0.240226506959101])
    assert kl.absolute(x).tolist() == pytest.approx([0.0, 0.693147180559945, 0.693147180559945])
    # 1/2 - 1 + ln 2 and 2 - 1 - ln 2
    assert kl.k3(x).tolist() == pytest.approx([0.0, 0.193147180559945, 0.306852819440055])


def test_k1_and_k3_average_to_the_divergence_and_k2_does_not():
    logits, reference = two_policies()
    logprobs = torch.log_softmax(logits, -1)
    x, p = logprobs - reference, logprobs.exp()
    exact = float((p * x).sum())
    assert float((p * kl.k1(x)).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((p * kl.k3(x)).sum()) == pytest.approx(exact, rel=1e-12)
    assert abs(float((p * kl.k2(x)).sum()) - exact) > 1e-3


def expected_gradient(estimator: object, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient of an estimator taken as a loss, averaged over all tokens under the policy itself."""
    assert callable(estimator)
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    (logprobs.detach().exp() * estimator(logprobs - reference)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def divergence_gradient(logits: torch.Tensor, reference: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    x = logprobs - reference
    (-(reference.exp() * x).sum() if reverse else (logprobs.exp() * x).sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_as_losses_k1_has_no_gradient_k2_the_forward_and_k3_the_reverse_one():
    logits, reference = two_policies()
    assert expected_gradient(kl.k1, logits, reference).abs().max() < 1e-15
    forward = divergence_gradient(logits, reference, reverse=False)
    backward = divergence_gradient(logits, reference, reverse=True)
    torch.testing.assert_close(expected_gradient(kl.k2, logits, reference), forward, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(expected_gradient(kl.k3, logits, reference), backward, rtol=1e-10, atol=1e-14)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    x = doubles(-1.3, 0.0, 0.1, 1e4).requires_grad_()
    found = kl.straight_through(kl.k1(x), kl.k2(x))
    found.sum().backward()
    assert torch.equal(found, x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach())  # of x^2 / 2


@pytest.mark.parametrize("value", [kl.k1, kl.k3])
def test_straight_through_k2_is_right_as_value_and_as_loss(value: object):
    assert callable(value)

    def estimator(x: torch.Tensor) -> torch.Tensor:
        return kl.straight_through(value(x), kl.k2(x))

    logits, reference = two_policies()
    x = torch.log_softmax(logits, -1) - reference
    exact = float((torch.log_softmax(logits, -1).exp() * x).sum())
    assert float((torch.log_softmax(logits, -1).exp() * estimator(x)).sum()) == pytest.approx(exact, rel=1e-12)
    forward = divergence_gradient(logits, reference, reverse=False)
    torch.testing.assert_close(expected_gradient(estimator, logits, reference), forward, rtol=1e-10, atol=1e-14)


def test_unbiased_k3_is_right_as_value_and_as_loss_whoever_sampled():
    logits, reference = two_policies()
    old = torch.log_softmax(torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(4)), -1)
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, -1)
    average = (old.exp() * kl.unbiased_k3(logprobs - reference, logprobs - old)).sum()
    exact = float((logprobs.exp() * (logprobs - reference)).sum().detach())
    assert float(average.detach()) == pytest.approx(exact, rel=1e-12)
    (found,) = torch.autograd.grad(average, leaf)
    forward = divergence_gradient(logits, reference, reverse=False)
    torch.testing.assert_close(found, forward, rtol=1e-10, atol=1e-14)
    # without the ratio neither is right
    assert abs(float((old.exp() * kl.k3(logprobs - reference)).sum().detach()) - exact) > 1e-2


def test_unbiased_k3_by_hand_and_at_extremes():
    x, old = doubles(math.log(2.0), 0.5), doubles(math.log(3.0), 0.0)
    # 3 (1/2 - 1 + ln 2), exp(-0.5) - 0.5
    expected = [3 * 0.193147180559945, math.exp(-0.5) - 0.5]
    assert kl.unbiased_k3(x, old).tolist() == pytest.approx(expected, rel=1e-12)
    extremes = torch.tensor([1e15, -1e15, 1e15, -1e15], requires_grad=True)
    ratios = torch.tensor([1e15, 1e15, -1e15, -1e15], requires_grad=True)
    values = kl.unbiased_k3(extremes, ratios)
    values.sum().backward()
    assert extremes.grad is not None
    assert bool(values.isfinite().all())
    assert bool(extremes.grad.isfinite().all())
    assert ratios.grad is None


@pytest.mark.parametrize("x", [-25.0, -18.0, -1e-4, 0.0, 1e-4, 3.0])
def test_the_gradient_of_unbiased_k3_keeps_its_digits_in_float32(x: float):
    log_ratio_T = torch.tensor([x], requires_grad=True)
    kl.unbiased_k3(log_ratio_T, torch.tensor([math.log(2.0)])).sum().backward()
    assert log_ratio_T.grad is not None
    assert float(log_ratio_T.grad) == pytest.approx(2.0 * x, rel=1e-6)  # r x


def test_absolute_is_neither_right_as_value_nor_as_loss():
    logits, reference = two_policies()
    logprobs = torch.log_softmax(logits, -1)
    exact = float((logprobs.exp() * (logprobs - reference)).sum())
    assert float((logprobs.exp() * kl.absolute(logprobs - reference)).sum()) - exact > 1e-2
    found = expected_gradient(kl.absolute, logits, reference)
    for reverse in (False, True):
        assert float((found - divergence_gradient(logits, reference, reverse=reverse)).abs().max()) > 1e-2


def test_absolute_as_a_loss_has_the_gradient_of_twice_the_total_variation():
    logits, reference = two_policies()
    leaf = logits.clone().requires_grad_()
    (torch.softmax(leaf, -1) - reference.exp()).abs().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(expected_gradient(kl.absolute, logits, reference), leaf.grad, rtol=1e-10, atol=1e-14)


def test_every_word_of_a_record_has_one_estimator():
    assert {*kl.ON_POLICY, *kl.OFF_POLICY} == set(get_args(KlEstimator))
    assert not kl.ON_POLICY.keys() & kl.OFF_POLICY.keys()


def test_absolute_pulls_with_the_same_force_everywhere():
    x = doubles(-1e30, -1e-9, 0.0, 2.0).requires_grad_()
    kl.absolute(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-1.0, -1.0, 0.0, 1.0]


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
def test_gradients_are_right(estimator: object):
    x = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimator, (x,))


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    x = torch.logspace(-6, 1, 200)
    assert bool((kl.k3(torch.cat([x, -x])) >= 0).all())
    small = torch.tensor([1e-3])
    assert float(kl.k3(small)) == pytest.approx(4.998333750e-7, rel=1e-3)


def test_k3_is_constant_beyond_its_limit_and_exact_on_the_other_side():
    x = torch.tensor([-1e3, -math.inf, -20.5, 50.0], requires_grad=True)
    values = kl.k3(x)
    values.sum().backward()
    assert x.grad is not None
    assert values[:3].tolist() == pytest.approx([math.exp(20) - 21] * 3, rel=1e-6)
    assert float(values[3].detach()) == pytest.approx(49.0)
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert kl.is_clamped(x.detach()).tolist() == [True, True, True, False]


def test_exactly_at_the_limit_nothing_is_clamped():
    assert kl.is_clamped(doubles(-20.0, -20.0 - 1e-12, 20.0, 99.0)).tolist() == [False, True, False, False]


def test_importance_weighted_k1_has_the_expected_value_and_gradient_of_the_divergence():
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).requires_grad_()
    log_pi = logits.log_softmax(0)
    log_old = torch.tensor([0.5, 0.1, -0.4, 0.2], dtype=torch.float64).log_softmax(0)
    log_ref = torch.tensor([-0.2, 0.4, 0.3, -0.9], dtype=torch.float64).log_softmax(0)
    # the expectation over tokens of the old policy, exactly
    expected = (log_old.exp() * kl.importance_weighted_k1(log_pi - log_ref, log_pi - log_old)).sum()
    exact = (log_pi.exp() * (log_pi - log_ref)).sum()
    torch.testing.assert_close(expected, exact)
    found = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, torch.autograd.grad(exact, logits)[0])
