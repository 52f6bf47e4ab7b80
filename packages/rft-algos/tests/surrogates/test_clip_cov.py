from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.surrogates import (
    clip_cov,
    clip_cov_clipped,
    importance_weighted,
    kl_cov,
    ppo_clip,
    ppo_clipped,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from rft_algos.surrogates.clip_cov import _draws
from rft_core.keyed_random import derive_key, uniforms

NAN = math.nan


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_covariances(logprobs: list[float], advantages: list[float], mask: list[bool]) -> list[float]:
    kept = [t for t, flag in enumerate(mask) if flag]
    if not kept:
        return [0.0] * len(mask)
    means = [math.fsum(x[t] for t in kept) / len(kept) for x in (logprobs, advantages)]
    return [(logprobs[t] - means[0]) * (advantages[t] - means[1]) if flag else 0.0 for t, flag in enumerate(mask)]


def plain_clip_cov(cov: list[float], mask: list[bool], low: float, high: float, fraction: float, key: int) -> set[int]:
    num = sum(mask) and max(1, int(fraction * sum(mask)))
    draws = uniforms([key], len(cov))[0].tolist()
    candidates = [t for t, flag in enumerate(mask) if flag and low <= cov[t] <= high]
    return set(sorted(candidates, key=lambda t: draws[t])[:num])


def random_batch(seed: int, num: int = 60) -> tuple[list[float], list[float], list[bool]]:
    numbers = random.Random(seed)
    mask = [numbers.random() < 0.8 for _ in range(num)]
    logprobs = [-3 * numbers.expovariate(1) if kept else NAN for kept in mask]
    advantages = [numbers.gauss(0, 1) if kept else NAN for kept in mask]
    return logprobs, advantages, mask


def test_hand_computed_covariances():
    # log-probs -1, -3, -5 of mean -3; advantages 2, 0, 1 of mean 1: 2 * 1, 0 * -1, -2 * 0
    mask = torch.tensor([True, True, False, True])
    found = token_covariances(doubles(-1.0, -3.0, NAN, -5.0), doubles(2.0, 0.0, NAN, 1.0), mask)
    assert found.tolist() == [2.0, 0.0, 0.0, 0.0]
    found = token_covariances(doubles(-1.0, -3.0, NAN, -5.0), doubles(2.0, 0.0, NAN, 4.0), mask)
    assert found.tolist() == [0.0, 0.0, 0.0, -4.0]


@pytest.mark.parametrize("seed", range(10))
def test_covariances_equal_a_plain_twin_and_add_up_to_zero_slope(seed: int):
    logprobs, advantages, mask = random_batch(seed)
    found = token_covariances(doubles(*logprobs), doubles(*advantages), torch.tensor(mask))
    assert found.tolist() == pytest.approx(plain_covariances(logprobs, advantages, mask), rel=1e-11, abs=1e-14)


def test_covariances_are_float64_without_a_gradient_and_zero_for_an_empty_batch():
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = token_covariances(leaf, torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    assert (found.dtype, found.requires_grad) == (torch.float64, False)
    assert token_covariances(leaf, leaf, torch.tensor([False, False])).tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="loss_mask_T must be bool"):
        token_covariances(leaf, leaf, torch.tensor([1.0, 1.0]))


@pytest.mark.parametrize("seed", range(20))
def test_clip_cov_draws_as_a_plain_twin_does(seed: int):
    numbers = random.Random(seed)
    mask = [numbers.random() < 0.8 for _ in range(200)]
    cov = [numbers.uniform(-2, 8) if kept else NAN for kept in mask]
    key = derive_key(seed, "clip_cov", 3)
    for fraction in (1e-6, 0.05, 1.0):
        found = select_clip_cov(doubles(*cov), torch.tensor(mask), fraction=fraction, key=key)
        assert found.dtype == torch.bool
        assert set(found.nonzero()[:, 0].tolist()) == plain_clip_cov(cov, mask, 1.0, 5.0, fraction, key)


def test_clip_cov_takes_its_bounds_as_inside_and_its_defaults_from_the_paper():
    cov, mask = doubles(0.999, 1.0, 5.0, 5.001, 3.0), torch.tensor([True, True, True, True, False])
    found = select_clip_cov(cov, mask, fraction=1.0, key=1)
    assert found.tolist() == [False, True, True, False, False]
    parameters = inspect.signature(select_clip_cov).parameters
    assert [parameters[name].default for name in ("low", "high", "fraction")] == [1.0, 5.0, 2e-4]
    cov, mask = torch.full((10_000,), 2.0, dtype=torch.float64), torch.ones(10_000, dtype=torch.bool)
    assert int(select_clip_cov(cov, mask, key=5).sum()) == 2  # floor(0.0002 * 10,000)


def test_clip_cov_depends_on_its_key_alone():
    cov, mask = torch.full((1000,), 2.0, dtype=torch.float64), torch.ones(1000, dtype=torch.bool)
    torch.manual_seed(1)
    first = select_clip_cov(cov, mask, fraction=0.1, key=-5)
    torch.manual_seed(2)
    assert torch.equal(first, select_clip_cov(cov, mask, fraction=0.1, key=-5))
    other = select_clip_cov(cov, mask, fraction=0.1, key=derive_key(0, "clip_cov", 0))
    assert int(other.sum()) == 100
    assert not torch.equal(first, other)


def test_nothing_to_draw_from_draws_nothing():
    assert not bool(select_clip_cov(doubles(0.0, 9.0), torch.tensor([True, True]), fraction=1.0, key=1).any())
    assert not bool(select_clip_cov(doubles(2.0), torch.tensor([False]), fraction=1.0, key=1).any())
    assert not bool(select_kl_cov(doubles(2.0), torch.tensor([False])).any())


@pytest.mark.parametrize("seed", range(20))
def test_kl_cov_takes_the_largest(seed: int):
    numbers = random.Random(seed)
    mask = [numbers.random() < 0.8 for _ in range(100)]
    cov = [float(numbers.randint(-3, 3)) if kept else NAN for kept in mask]
    for fraction in (1e-6, 0.07, 0.5, 1.0):
        num = max(1, int(fraction * sum(mask)))
        ranked = sorted((t for t, kept in enumerate(mask) if kept), key=lambda t: (-cov[t], t))
        found = select_kl_cov(doubles(*cov), torch.tensor(mask), fraction=fraction)
        assert found.nonzero()[:, 0].tolist() == sorted(ranked[:num])


def test_kl_cov_takes_its_default_from_the_paper():
    cov, mask = torch.arange(1000, dtype=torch.float64), torch.ones(1000, dtype=torch.bool)
    assert select_kl_cov(cov, mask).nonzero()[:, 0].tolist() == [998, 999]  # 0.002 of 1000
    assert inspect.signature(select_kl_cov).parameters["fraction"].default == 2e-3


def test_pitfall_8_the_selection_is_that_of_the_whole_batch():
    logprobs, advantages, mask = random_batch(1, 200)
    loud = doubles(*advantages[:100], *[10 * a for a in advantages[100:]])  # the second half varies ten times as much
    tensors = doubles(*logprobs), loud, torch.tensor(mask)
    whole = select_kl_cov(token_covariances(*tensors), tensors[2], fraction=0.05)
    half = [x[:100] for x in tensors]
    alone = select_kl_cov(token_covariances(*half), half[2], fraction=0.05)
    assert int(whole.sum()) == int(0.05 * sum(mask))
    assert int(whole[:100].sum()) < int(alone.sum())  # a micro-batch that selected for itself would take more


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_batch_does_not_matter_to_the_largest(seed: int):
    logprobs, advantages, mask = random_batch(seed)
    tensors = doubles(*logprobs), doubles(*advantages), torch.tensor(mask)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    here = select_kl_cov(token_covariances(*tensors), tensors[2], fraction=0.2)
    moved = [x[order] for x in tensors]
    assert torch.equal(select_kl_cov(token_covariances(*moved), moved[2], fraction=0.2), here[order])


def test_hand_computed_losses():
    log_ratios, advantages = doubles(1.5, 1.5, 0.5).log(), doubles(2.0, 2.0, -2.0)
    selected = torch.tensor([False, True, False])
    found = clip_cov(log_ratios, advantages, selected, 0.2, 0.3)
    assert found.tolist() == pytest.approx([-2.6, 0.0, 1.6], rel=1e-12)
    assert clip_cov_clipped(log_ratios, advantages, selected, 0.2, 0.6).tolist() == [False, True, True]
    # -2 * 1.5, -2 * 1.5 + 1 * log 1.5, 2 * 0.5
    found = kl_cov(log_ratios, advantages, selected)
    assert found.tolist() == pytest.approx([-3.0, -3.0 + math.log(1.5), 1.0], rel=1e-12)
    found = kl_cov(log_ratios, advantages, ~selected, coefficient=0.5)
    assert found.tolist() == pytest.approx([-3.0 + math.log(1.5) / 2, -3.0, 1.0 + math.log(2) / 2], rel=1e-12)


def test_losses_without_a_selection_are_the_plain_ones():
    x, a = torch.linspace(-1, 1, 9, dtype=torch.float64), torch.linspace(1, -1.3, 9, dtype=torch.float64)
    none = torch.zeros(9, dtype=torch.bool)
    assert torch.equal(clip_cov(x, a, none, 0.2, 0.3), ppo_clip(x, a, 0.2, 0.3))
    assert torch.equal(clip_cov_clipped(x, a, none, 0.2, 0.3), ppo_clipped(x, a, 0.2, 0.3))
    assert torch.equal(kl_cov(x, a, none), importance_weighted(x, a))


def test_a_selected_token_has_no_gradient_in_one_and_a_pull_in_the_other():
    x, a = doubles(0.1, 0.1, -0.1), doubles(1.0, 1.0, 1.0)
    selected = torch.tensor([True, False, True])
    leaf = x.clone().requires_grad_()
    clip_cov(leaf, a, selected, 0.2, 0.2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([0.0, -math.exp(0.1), 0.0])
    leaf = x.clone().requires_grad_()
    kl_cov(leaf, a, selected, 2.0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([2 - math.exp(0.1), -math.exp(0.1), -2 - math.exp(-0.1)])


def test_gradients_are_right():
    x = torch.linspace(-1.03, 1.03, 8, dtype=torch.float64, requires_grad=True)
    a = torch.linspace(-1, 1.3, 8, dtype=torch.float64)
    selected = torch.tensor([True, False] * 4)
    assert torch.autograd.gradcheck(lambda y: clip_cov(y, a, selected, 0.2, 0.28), (x,))
    assert torch.autograd.gradcheck(lambda y: kl_cov(y, a, selected, 0.7), (x,))


def test_a_selection_over_another_batch_is_refused():
    for select in (lambda c, m: select_clip_cov(c, m, key=1), select_kl_cov):
        with pytest.raises(InputError, match=r"for torch\.Size"):
            select(doubles(1.0, 2.0), torch.tensor([True]))


def test_a_single_loss_token_has_no_covariance():
    for mask in ([True], [False, True, False]):
        values = doubles(*[3.0] * len(mask))
        assert token_covariances(values, values, torch.tensor(mask)).tolist() == [0.0] * len(mask)


@pytest.mark.parametrize("key", [0, 5, -2, 0x13198A2E_03707344, derive_key(1, "clip-cov")])
def test_the_draws_are_those_of_the_keyed_stream(key: int):
    # the 53 bits of a uniform number, as an integer
    positions = torch.tensor([0, 1, 7, 59])
    expected = (uniforms([key], 60)[0][positions] * 2.0**53).long()
    assert torch.equal(_draws(key, positions), expected)
