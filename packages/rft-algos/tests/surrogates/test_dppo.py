from __future__ import annotations

import inspect
import itertools
import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.algorithms.components import Dppo
from rft_algos.input_checks import InputError
from rft_algos.surrogates import dppo_kl, dppo_kl_kept, dppo_top_k, dppo_tv, dppo_tv_kept, reinforce, top_k_divergence
from rft_algos.surrogates.dppo import _binary_kl
from rft_core.errors import OptionsError

TOKENS = st.lists(st.tuples(st.floats(-9, -0.01), st.floats(-9, -0.01), st.floats(-3, 3)), min_size=1, max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_tv_kept(logprob: float, old: float, advantage: float, low: float, high: float) -> bool:
    moved = math.exp(logprob) - math.exp(old)
    return moved <= high if advantage > 0 else moved >= -low


def plain_kl_kept(logprob: float, old: float, advantage: float, low: float, high: float) -> bool:
    p, q = math.exp(old), math.exp(logprob)
    divergence = p * (old - logprob) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    if advantage > 0:
        return not (divergence > high and q > p)
    return not (divergence > low and q < p)


def plain_loss(logprob: float, old: float, advantage: float, kept: bool, max_ratio: float) -> float:
    return -kept * advantage * min(math.exp(max(-20.0, min(20.0, logprob - old))), max_ratio) * logprob


def test_hand_computed_values_of_total_variation():
    logprobs, old = doubles(0.5, 0.5, 0.2, 0.2).log(), doubles(0.2, 0.2, 0.5, 0.5).log()
    advantages = doubles(2.0, -2.0, 2.0, -2.0)
    # up by 0.3: dropped if wanted; down by 0.3: dropped if wanted
    assert dppo_tv_kept(logprobs, old, advantages, 0.25, 0.25).tolist() == [False, True, True, False]
    assert dppo_tv_kept(logprobs, old, advantages, 0.25, 0.35).tolist() == [True, True, True, False]
    assert dppo_tv_kept(logprobs, old, advantages, 0.35, 0.25).tolist() == [False, True, True, True]
    # 0; 2 * 2.5 log 0.5; -2 * 0.4 log 0.2; 0
    expected = [0.0, 5 * math.log(0.5), -0.8 * math.log(0.2), 0.0]
    assert dppo_tv(logprobs, old, advantages, 0.25, 0.25).tolist() == pytest.approx(expected, rel=1e-12)


def test_hand_computed_values_of_the_binary_divergence():
    logprobs, old = doubles(0.5, 0.5, 0.2, 0.2).log(), doubles(0.2, 0.2, 0.5, 0.5).log()
    advantages = doubles(2.0, -2.0, 2.0, -2.0)
    # 0.2 -> 0.5: 0.2 log 0.4 + 0.8 log 1.6 = 0.192745; 0.5 -> 0.2: 0.5 log 2.5 + 0.5 log 0.625 = 0.223144
    assert dppo_kl_kept(logprobs, old, advantages, 0.2, 0.2).tolist() == [True, True, True, False]
    assert dppo_kl_kept(logprobs, old, advantages, 0.2, 0.19).tolist() == [False, True, True, False]
    assert dppo_kl_kept(logprobs, old, advantages, 0.2231, 0.1927).tolist() == [False, True, True, False]
    assert dppo_kl_kept(logprobs, old, advantages, 0.2232, 0.1928).tolist() == [True, True, True, True]
    expected = [0.0, 5 * math.log(0.5), -0.8 * math.log(0.2), 0.0]
    assert dppo_kl(logprobs, old, advantages, 0.19, 0.19).tolist() == pytest.approx(expected, rel=1e-12)


@given(TOKENS, st.floats(0.01, 0.9), st.floats(0.01, 0.9), st.floats(1.0, 30.0))
def test_equals_a_plain_twin(tokens: list[tuple[float, float, float]], low: float, high: float, max_ratio: float):
    inputs = [doubles(*[token[i] for token in tokens]) for i in range(3)]
    for loss, kept, plain in ((dppo_tv, dppo_tv_kept, plain_tv_kept), (dppo_kl, dppo_kl_kept, plain_kl_kept)):
        expected = [plain(*token, low, high) for token in tokens]
        assert kept(*inputs, low, high).tolist() == expected
        losses = [plain_loss(*token, flag, max_ratio) for token, flag in zip(tokens, expected, strict=True)]
        assert loss(*inputs, low, high, max_ratio).tolist() == pytest.approx(losses, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_the_weight_is_capped_and_has_no_gradient(loss: object):
    assert callable(loss)
    assert inspect.signature(loss).parameters["max_ratio"].default == 20.0
    logprobs = doubles(-1.0, -1.0, -1.0).requires_grad_()
    old = doubles(-1.0 - math.log(30.0), -1.0 - math.log(5.0), -1.0)
    loss(logprobs, old, doubles(-1.0, -1.0, 2.0), 1e9, 1e9).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([20.0, 5.0, -2.0], rel=1e-12)


def test_exactly_at_the_limit_a_token_is_kept():
    half, quarter = doubles(0.5).log(), doubles(0.25).log()
    moved = float((half.exp() - quarter.exp())[0])
    assert dppo_tv_kept(half, quarter, doubles(1.0), 1.0, moved).tolist() == [True]
    assert dppo_tv_kept(half, quarter, doubles(1.0), 1.0, math.nextafter(moved, 0)).tolist() == [False]
    assert dppo_tv_kept(quarter, half, doubles(-1.0), moved, 1.0).tolist() == [True]
    assert dppo_tv_kept(quarter, half, doubles(-1.0), math.nextafter(moved, 0), 1.0).tolist() == [False]


def test_no_advantage_counts_as_a_negative_one():
    up, down = (doubles(0.9).log(), doubles(0.1).log()), (doubles(0.1).log(), doubles(0.9).log())
    for kept in (dppo_tv_kept, dppo_kl_kept):
        assert kept(*up, doubles(0.0), 0.01, 0.01).tolist() == [True]
        assert kept(*down, doubles(0.0), 0.01, 0.01).tolist() == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_tokens_have_a_finite_divergence(dtype: torch.dtype):
    logprobs = torch.tensor([0.0, 0.0, -1e-6, -60.0, 0.0], dtype=dtype)
    old = torch.tensor([0.0, -1e-6, 0.0, 0.0, -60.0], dtype=dtype)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=dtype)
    # p = 1 - 1e-6 to q = 1 is 1e-6 log 101 - 1e-6 = 3.615e-6 nats with the epsilon, and would be infinite without
    assert dppo_kl_kept(logprobs, old, advantages, 0.05, 0.05).tolist() == [True, True, True, False, False]
    assert dppo_kl_kept(logprobs, old, advantages, 0.05, 3.60e-6).tolist()[1] is False
    assert dppo_kl_kept(logprobs, old, advantages, 0.05, 3.63e-6).tolist()[1] is True


def test_a_rare_token_may_move_far_and_a_common_one_may_not():
    logprobs, old = doubles(1e-5, 0.9).log(), doubles(1e-7, 0.45).log()  # ratios 100 and 2
    for kept in (dppo_tv_kept, dppo_kl_kept):
        assert kept(logprobs, old, doubles(1.0, 1.0), 0.2, 0.2).tolist() == [True, False]


def test_at_the_old_policy_the_loss_is_reinforce():
    old, advantages = doubles(-1.0, -0.2, 0.0), doubles(1.0, -2.0, 0.5)
    for loss in (dppo_tv, dppo_kl):
        assert torch.equal(loss(old, old, advantages, 0.1, 0.1), reinforce(old, advantages))


def test_gradients_are_right():
    """Of a weight and a mask held fixed, as the equation says: minus weight times advantage."""
    logprobs = torch.linspace(-3, -0.1, 9, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.full((9,), -1.5, dtype=torch.float64), torch.linspace(-1, 1.3, 9, dtype=torch.float64)
    for loss, kept in ((dppo_tv, dppo_tv_kept), (dppo_kl, dppo_kl_kept)):
        (found,) = torch.autograd.grad(loss(logprobs, old, advantages, 0.2, 0.2).sum(), logprobs)
        mask = kept(logprobs, old, advantages, 0.2, 0.2)
        assert not kept(logprobs, old, advantages, 0.2, 0.2).requires_grad
        expected = torch.where(mask, -advantages * (logprobs.detach() - old).exp(), 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_the_epsilon_of_the_divergence_is_1e_8():
    # from p = 1/2 to q = 1: 1/2 log(1/2) + 1/2 log((1/2 + e) / e) = 8.517 at e = 1e-8, 8.469 at 1.1e-8
    risen, old = doubles(0.0), doubles(0.5).log()
    assert dppo_kl_kept(risen, old, doubles(1.0), 8.5, 8.5).tolist() == [False]
    assert dppo_kl_kept(risen, old, doubles(1.0), 8.53, 8.53).tolist() == [True]


def test_exactly_at_the_limit_of_the_divergence_a_token_is_kept():
    # the limit is what the equation itself gives, to the last digit
    old, logprobs = doubles(0.5, 0.5).log(), doubles(0.7, 0.3).log()
    divergences = _binary_kl(old, logprobs)
    for token, advantage in ((0, 1.0), (1, -1.0)):
        limit, one = divergences[token].item(), slice(token, token + 1)
        assert dppo_kl_kept(logprobs[one], old[one], doubles(advantage), limit, limit).tolist() == [True]
        less = limit * (1 - 1e-12)
        assert dppo_kl_kept(logprobs[one], old[one], doubles(advantage), less, less).tolist() == [False]


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl])
def test_no_gradient_reaches_the_old_policy(loss):  # type: ignore[no-untyped-def]
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64).requires_grad_()
    old = torch.tensor([-1.1, -1.9], dtype=torch.float64).requires_grad_()
    loss(logprobs, old, torch.ones(2, dtype=torch.float64), 0.5, 0.5).sum().backward()
    assert old.grad is None
    assert logprobs.grad is not None


def rows(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, 7, 9, dtype=torch.float64, generator=generator) * 2
    return old.log_softmax(1)[:, :k], new.log_softmax(1)[:, :k]


def test_one_token_is_the_binary_divergence() -> None:
    old, new = rows(0, 1)
    torch.testing.assert_close(top_k_divergence(old, new), (old.exp() - new.exp()).abs()[:, 0])
    expected = _binary_kl(old[:, 0], new[:, 0])
    torch.testing.assert_close(top_k_divergence(old, new, divergence="kl"), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_divergences_grow_with_the_tokens_that_are_told_apart(divergence: Literal["tv", "kl"]) -> None:
    values = [top_k_divergence(*rows(1, k), divergence=divergence) for k in range(1, 10)]
    for fewer, more in itertools.pairwise(values):
        assert bool((more >= fewer - 1e-6).all())  # the binary KL has an epsilon
    old, new = rows(1, 9)
    p, q = old.exp(), new.exp()
    whole = (p - q).abs().sum(1) / 2 if divergence == "tv" else (p * (old - new)).sum(1)
    torch.testing.assert_close(values[-1], whole, rtol=1e-6, atol=1e-9)


def test_a_token_is_left_out_where_it_left_the_region_and_would_go_on() -> None:
    logprobs = torch.tensor([-0.5, -0.5, -1.5, -1.5, -0.5], dtype=torch.float64).requires_grad_()
    old, far = torch.full((5,), -1.0, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    dppo_top_k(logprobs, old, advantages, far, 0.5, 0.5, max_ratio=1.2).sum().backward()
    assert logprobs.grad is not None
    low = math.exp(-0.5)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.2, -low, 0.0, -1.2])


def test_shapes_and_words_are_checked() -> None:
    old, new = rows(0, 2)
    with pytest.raises(InputError, match=r"\[T, K\]"):
        top_k_divergence(old, new[:, :1])
    with pytest.raises(InputError, match="one of tv, kl"):
        top_k_divergence(old, new, divergence="js")  # type: ignore[arg-type]


def test_a_record_sets_the_cap_of_the_ratio() -> None:
    assert Dppo().max_ratio == inspect.signature(dppo_tv).parameters["max_ratio"].default
    assert Dppo(max_ratio=math.inf).max_ratio == math.inf
    with pytest.raises(OptionsError, match="max_ratio"):
        Dppo(max_ratio=0.5)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("moved", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("divergence", [0.05, 0.15, 0.25])
def test_of_a_wider_divergence_each_side_has_its_own_limit(advantage: float, moved: float, divergence: float) -> None:
    logprobs, old = doubles(-1.0 + moved).requires_grad_(), doubles(-1.0)
    limit_low, limit_high = 0.1, 0.2
    dppo_top_k(logprobs, old, doubles(advantage), doubles(divergence), limit_low, limit_high).sum().backward()
    left_out = (advantage > 0 and moved > 0 and divergence > limit_high) or (
        advantage < 0 and moved < 0 and divergence > limit_low
    )
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if left_out else -advantage * math.exp(moved))
