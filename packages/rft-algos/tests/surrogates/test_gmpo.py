from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.surrogates import gmpo, gmpo_clipped

NAN = math.nan


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(
    log_ratios: list[float], advantages: list[float], mask: list[bool], ids: list[int], low: float, high: float
) -> tuple[list[float], list[bool]]:
    losses: list[float] = []
    flags: list[bool] = []
    for t, i in enumerate(ids):
        own = [u for u, other in enumerate(ids) if other == i and mask[u] and i >= 0]
        if t not in own:
            losses.append(0.0)
            flags.append(False)
            continue
        advantage = math.fsum(advantages[u] for u in own) / len(own)
        bounded = [min(log_ratios[u], high) if advantage > 0 else max(log_ratios[u], -low) for u in own]
        losses.append(-advantage * math.exp(max(-20.0, min(20.0, math.fsum(bounded) / len(own)))))
        flags.append(log_ratios[t] > high if advantage > 0 else log_ratios[t] < -low)
    return losses, flags


def ragged(seed: int, spread: float) -> tuple[list[float], list[float], list[bool], list[int]]:
    numbers = random.Random(seed)
    lengths = [numbers.choice([1, 1, 2, 3, 8, 17]) for _ in range(numbers.randint(1, 6))]
    names = numbers.sample(range(sum(lengths)), len(lengths))
    ids = [i for i, length in zip(names, lengths, strict=True) for _ in range(length)]
    masked_row = numbers.choice(names)
    mask = [numbers.random() < 0.7 and i != masked_row for i in ids] + [False] * 2
    ids += [-1, -1]
    return (
        [numbers.gauss(0, spread) if kept else NAN for kept in mask],
        [numbers.gauss(0, 1) if kept else NAN for kept in mask],
        mask,
        ids,
    )


def test_hand_computed_values():
    # A = 2 > 0: log-ratios 0.9 -> 0.4, -0.7 stays, mean -0.15; A = -1 < 0: 0.9 stays, -0.7 -> -0.4, mean 0.25
    log_ratios, ids = doubles(0.9, -0.7, 0.9, -0.7), torch.tensor([0, 0, 1, 1])
    mask, advantages = torch.ones(4, dtype=torch.bool), doubles(1.0, 3.0, -1.0, -1.0)
    expected = [-2 * math.exp(-0.15)] * 2 + [math.exp(0.25)] * 2
    assert gmpo(log_ratios, advantages, mask, ids).tolist() == pytest.approx(expected, rel=1e-12)
    assert gmpo_clipped(log_ratios, advantages, mask, ids).tolist() == [True, False, False, True]
    # other bounds: 0.9 -> 0.5, mean -0.1; -0.7 -> -0.3, mean 0.3
    expected = [-2 * math.exp(-0.1)] * 2 + [math.exp(0.3)] * 2
    assert gmpo(log_ratios, advantages, mask, ids, 0.3, 0.5).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("spread", "low", "high"), [(0.5, 0.4, 0.4), (1.0, 0.2, 0.7), (60.0, 50.0, 50.0)])
def test_equals_a_plain_twin(seed: int, spread: float, low: float, high: float):
    lists = ragged(seed, spread)
    tensors = doubles(*lists[0]), doubles(*lists[1]), torch.tensor(lists[2]), torch.tensor(lists[3])
    losses, flags = plain(*lists, low, high)
    assert gmpo(*tensors, low, high).tolist() == pytest.approx(losses, rel=1e-12)
    assert gmpo_clipped(*tensors, low, high).tolist() == flags


@pytest.mark.parametrize("function", [gmpo, gmpo_clipped])
def test_the_bounds_are_those_of_the_paper_by_default(function: object):
    assert callable(function)
    parameters = inspect.signature(function).parameters
    assert (parameters["clip_low"].default, parameters["clip_high"].default) == (0.4, 0.4)


def test_exactly_at_the_bound_nothing_is_clipped():
    log_ratios, ids = doubles(0.4, -0.4), torch.tensor([0, 1])
    mask, advantages = torch.ones(2, dtype=torch.bool), doubles(1.0, -1.0)
    leaf = log_ratios.clone().requires_grad_()
    gmpo(leaf, advantages, mask, ids).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-math.exp(0.4), math.exp(-0.4)])
    assert gmpo_clipped(log_ratios, advantages, mask, ids).tolist() == [False, False]


@pytest.mark.parametrize("seed", range(10))
def test_the_clip_indicator_is_where_the_gradient_is_zero(seed: int):
    lists = ragged(seed, 0.6)
    mask = torch.tensor(lists[2])
    inputs = doubles(*lists[1]), mask, torch.tensor(lists[3])
    leaf = doubles(*lists[0]).requires_grad_()
    gmpo(leaf, *inputs).sum().backward()
    assert leaf.grad is not None
    assert torch.equal((leaf.grad == 0) & mask, gmpo_clipped(leaf.detach(), *inputs))


def test_one_token_does_not_decide_the_ratio_of_its_sequence():
    mask, ids = torch.ones(10, dtype=torch.bool), torch.zeros(10, dtype=torch.int64)
    log_ratios = doubles(*[0.0] * 9, 15.0)
    found = gmpo(log_ratios, torch.ones(10, dtype=torch.float64), mask, ids)
    assert found.tolist() == pytest.approx([-math.exp(0.04)] * 10)


def test_pitfall_6_nan_at_masked_positions_reaches_neither_loss_nor_gradient():
    for seed in range(5):
        lists = ragged(seed, 0.6)
        mask, leaf = torch.tensor(lists[2]), doubles(*lists[0]).requires_grad_()
        losses = gmpo(leaf, doubles(*lists[1]), mask, torch.tensor(lists[3]))
        losses.sum().backward()
        assert leaf.grad is not None
        assert bool(losses.isfinite().all())
        assert bool(leaf.grad.isfinite().all())
        assert bool((leaf.grad[~mask] == 0).all())


def test_pitfall_8_a_masked_row_does_not_change_the_others():
    log_ratios, advantages, ids = doubles(0.1, 0.2, 0.3), doubles(1.0, 1.0, 5.0), torch.tensor([0, 0, 1])
    mask = torch.tensor([True, True, False])
    assert torch.equal(
        gmpo(log_ratios, advantages, mask, ids)[:2], gmpo(log_ratios[:2], advantages[:2], mask[:2], ids[:2])
    )


def test_gradients_are_right():
    log_ratios = torch.linspace(-0.83, 0.9, 10, dtype=torch.float64, requires_grad=True)
    mask, ids = torch.tensor([True] * 8 + [False, True]), torch.tensor([2, 2, 2, 0, 0, 1, 1, 1, 1, 1])
    for sign in (1.0, -1.0):
        advantages = sign * torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, a=advantages: gmpo(x, a, mask, ids), (log_ratios,))


def test_where_the_advantage_is_zero_or_masked_nothing_is_clipped():
    log_ratios, ids = doubles(5.0, -5.0, 5.0, -5.0, 0.0), torch.tensor([0, 0, 1, 1, 1])
    mask, advantages = torch.tensor([True, True, False, False, True]), doubles(0.0, 0.0, 1.0, -1.0, 1.0)
    assert gmpo_clipped(log_ratios, advantages, mask, ids).tolist() == [False] * 5
