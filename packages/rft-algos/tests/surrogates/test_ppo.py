from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.surrogates import dual_clip, dual_clipped, ppo_clip, ppo_clipped, two_sided, two_sided_clipped

TOKENS = st.lists(st.tuples(st.floats(-30, 30), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_dual(log_ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    r = math.exp(max(-20.0, min(20.0, log_ratio)))
    loss = max(-advantage * r, -advantage * max(1 - low, min(1 + high, r)))
    return min(loss, dual * -advantage) if advantage < 0 else loss


def plain_two_sided(log_ratio: float, advantage: float, low: float, high: float, delta: float) -> float:
    r = math.exp(max(-20.0, min(20.0, log_ratio)))
    return max(-advantage * min(r, delta), -advantage * max(1 - low, min(1 + high, r)))


def test_hand_computed_values_at_negative_advantages():
    log_ratios = doubles(5.0, 3.5, 2.0, 0.5, 5.0).log()
    advantages = doubles(-2.0, -2.0, -2.0, -2.0, 2.0)
    # min(2 * 5, 3 * 2) = 6, min(2 * 3.5, 6) = 6, 2 * 2 = 4, 2 * 0.8 = 1.6; positive: -2 * 1.3
    expected = [6.0, 6.0, 4.0, 1.6, -2.6]
    assert dual_clip(log_ratios, advantages, 0.2, 0.3).tolist() == pytest.approx(expected, rel=1e-12)
    assert two_sided(log_ratios, advantages, 0.2, 0.3, 3.0).tolist() == pytest.approx(expected, rel=1e-12)
    clipped = [True, True, False, True, True]
    assert dual_clipped(log_ratios, advantages, 0.2, 0.3).tolist() == clipped
    assert two_sided_clipped(log_ratios, advantages, 0.2, 0.3, 3.0).tolist() == clipped
    assert dual_clip(log_ratios, advantages, 0.2, 0.3, dual=4.0).tolist() == pytest.approx([8.0, 7.0, 4.0, 1.6, -2.6])


@given(TOKENS, st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.floats(2.0, 10.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float]], low: float, high: float, dual: float):
    log_ratios, advantages = doubles(*[x for x, _ in tokens]), doubles(*[a for _, a in tokens])
    expected = [plain_dual(x, a, low, high, dual) for x, a in tokens]
    assert dual_clip(log_ratios, advantages, low, high, dual).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)
    expected = [plain_two_sided(x, a, low, high, dual) for x, a in tokens]
    assert two_sided(log_ratios, advantages, low, high, dual).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(TOKENS)
def test_the_clip_indicator_is_where_the_gradient_is_zero(tokens: list[tuple[float, float]]):
    log_ratios = doubles(*[max(-19.0, min(19.0, x)) for x, _ in tokens]).requires_grad_()
    advantages = doubles(*[a if abs(a) > 1e-3 else 1.0 for _, a in tokens])
    dual_clip(log_ratios, advantages, 0.2, 0.28).sum().backward()
    assert log_ratios.grad is not None
    assert (log_ratios.grad == 0).tolist() == dual_clipped(log_ratios, advantages, 0.2, 0.28).tolist()


def test_without_reach_of_the_second_clip_it_is_ppo():
    log_ratios, advantages = doubles(-3.0, -0.1, 0.0, 0.5, 2.0), doubles(1.0, -2.0, 0.5, -1.0, -1.0)
    assert torch.equal(dual_clip(log_ratios, advantages, 0.2, 0.2, 1e9), ppo_clip(log_ratios, advantages, 0.2, 0.2))
    assert torch.equal(
        dual_clipped(log_ratios, advantages, 0.2, 0.2, 1e9), ppo_clipped(log_ratios, advantages, 0.2, 0.2)
    )


def test_the_loss_of_a_bad_token_is_bounded_and_constant_beyond():
    log_ratios = doubles(math.log(3.0), 1.2, 4.0, 25.0, math.inf).requires_grad_()
    losses = dual_clip(log_ratios, doubles(-1.0, -1.0, -1.0, -1.0, -1.0), 0.2, 0.2)
    losses.sum().backward()
    assert log_ratios.grad is not None
    assert losses.tolist() == pytest.approx([3.0, 3.0, 3.0, 3.0, 3.0], rel=1e-12)
    assert log_ratios.grad[1:].tolist() == [0.0] * 4


def graph(result: torch.Tensor) -> set[str]:
    """Names of all nodes of the graph that `backward` walks."""
    names: set[str] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [parent for parent, _ in node.next_functions]
    return names


def test_the_clip_is_not_differentiated():
    losses = ppo_clip(doubles(0.5, -0.5).requires_grad_(), doubles(1.0, -1.0), 0.2, 0.2)
    assert not [name for name in graph(losses) if "Clamp" in name or "Maximum" in name]


def test_exactly_at_the_bound_the_token_still_learns():
    log_ratios = doubles(math.log(2.0)).requires_grad_()  # exp gives exactly 2
    dual_clip(log_ratios, doubles(-1.5), 0.2, 0.2, 2.0).sum().backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx([3.0])
    assert dual_clipped(log_ratios, doubles(-1.5), 0.2, 0.2, 2.0).tolist() == [False]


@pytest.mark.parametrize("extreme", [1e3, -1e3, math.inf, -math.inf])
def test_infinities_give_finite_values_and_zero_gradients(extreme: float):
    log_ratios = torch.tensor([extreme, extreme], requires_grad=True)
    loss = dual_clip(log_ratios, torch.tensor([1.0, -1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert log_ratios.grad is not None
    assert bool(loss.isfinite().all())
    assert log_ratios.grad.tolist() == [0.0, 0.0]


def test_a_nan_is_not_hidden():
    log_ratios = doubles(math.nan, math.nan).requires_grad_()
    losses = dual_clip(log_ratios, doubles(1.0, -1.0), 0.2, 0.2)
    losses.sum().backward()
    assert log_ratios.grad is not None
    assert bool(losses.isnan().all())
    assert bool(log_ratios.grad.isnan().all())


def test_gradients_are_right():
    log_ratios = torch.linspace(-1.03, 2.03, 15, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        advantages = torch.full((15,), sign * 1.7, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, a=advantages: dual_clip(x, a, 0.2, 0.28), (log_ratios,))
        assert torch.autograd.gradcheck(lambda x, a=advantages: two_sided(x, a, 0.2, 0.28, 4.0), (log_ratios,))


def test_bounds_that_make_no_sense_are_refused():
    x = doubles(0.0)
    with pytest.raises(InputError, match=r"dual must be above 1, it is 1\.0"):
        dual_clip(x, x, 0.2, 0.2, 1.0)
    with pytest.raises(InputError, match=r"delta must be above 1 \+ clip_high = 1.5, it is 1.5"):
        two_sided(x, x, 0.2, 0.5, 1.5)


def test_exactly_at_a_bound_nothing_is_clipped():
    # bounds computed from the ratios, so that 1 + clip_high and 1 - clip_low are them to the last digit
    high, low = torch.exp(doubles(0.3)).item(), torch.exp(doubles(-0.3)).item()
    log_ratios, advantages = doubles(0.3, -0.3), doubles(1.0, -1.0)
    assert ppo_clipped(log_ratios, advantages, 1.0 - low, high - 1.0).tolist() == [False, False]
    beyond = log_ratios * (1 + 1e-12)
    assert ppo_clipped(beyond, advantages, 1.0 - low, high - 1.0).tolist() == [True, True]


def test_a_token_of_advantage_zero_is_not_clipped():
    log_ratios, zeros = doubles(5.0, -5.0), doubles(0.0, 0.0)
    assert ppo_clipped(log_ratios, zeros, 0.2, 0.2).tolist() == [False, False]
    assert dual_clipped(log_ratios, zeros, 0.2, 0.2).tolist() == [False, False]


def test_the_second_clip_is_for_negative_advantages_alone():
    # a ratio of 4, between dual = 3 and 1 + clip_high = 6
    log_ratios = doubles(4.0, 4.0, 4.0, 4.0).log()
    assert dual_clipped(log_ratios, doubles(1.0, 0.5, 0.0, -1.0), 0.2, 5.0).tolist() == [False, False, False, True]
    assert dual_clipped(doubles(3.2).log(), doubles(-1.0), 0.2, 5.0).tolist() == [True]
    assert dual_clipped(doubles(2.9).log(), doubles(-1.0), 0.2, 5.0).tolist() == [False]


def test_bounds_just_above_their_least_are_taken():
    log_ratios, advantages = doubles(2.0).log(), doubles(-1.0)
    assert dual_clip(log_ratios, advantages, 0.2, 0.2, dual=1.05).tolist() == [1.05]
    assert two_sided(log_ratios, advantages, 0.2, 0.2, 1.25).tolist() == [1.25]
