from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.losses import aggregation
from rft_algos.surrogates import gspo, gspo_clipped, gspo_token, gspo_token_clipped, ppo_clip, ppo_clipped

NAN = math.nan


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(
    log_ratios: list[float], advantages: list[float], mask: list[bool], ids: list[int], low: float, high: float
) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """GSPO, GSPO-token and their clip indicators, token by token."""
    results: tuple[list[float], list[float], list[bool], list[bool]] = ([], [], [], [])
    for i, kept in zip(ids, mask, strict=True):
        own = [t for t, other in enumerate(ids) if other == i and mask[t]]
        t = len(results[0])
        if not kept or i < 0:
            for result, value in zip(results, (0.0, 0.0, False, False), strict=True):
                result.append(value)  # type: ignore[arg-type]
            continue
        mean_log = math.fsum(log_ratios[u] for u in own) / len(own)
        s = math.exp(max(-20.0, min(20.0, mean_log)))
        bounded = max(1 - low, min(1 + high, s))
        for advantage, losses, flags in (
            (math.fsum(advantages[u] for u in own) / len(own), results[0], results[2]),
            (advantages[t], results[1], results[3]),
        ):
            losses.append(-min(advantage * s, advantage * bounded))
            flags.append((advantage > 0 and s > 1 + high) or (advantage < 0 and s < 1 - low))
    return results


def ragged(seed: int, spread: float) -> tuple[list[float], list[float], list[bool], list[int]]:
    numbers = random.Random(seed)
    lengths = [numbers.choice([1, 1, 2, 3, 8, 17]) for _ in range(numbers.randint(1, 6))]
    names = numbers.sample(range(sum(lengths)), len(lengths))
    ids = [i for i, length in zip(names, lengths, strict=True) for _ in range(length)]
    masked_row = numbers.choice(names)
    mask = [numbers.random() < 0.7 and i != masked_row for i in ids] + [False] * 2
    ids += [-1, -1]
    log_ratios = [numbers.gauss(0, spread) if kept else NAN for kept in mask]
    advantages = [numbers.gauss(0, 1) if kept else NAN for kept in mask]
    return log_ratios, advantages, mask, ids


def test_hand_computed_values():
    # sequence 0: log-ratios 0.1 and -0.06 at its two loss tokens, mean 0.02, s = exp(0.02)
    # sequence 1: one token, log-ratio -0.02, s = exp(-0.02)
    log_ratios, ids = doubles(0.1, 9.0, -0.06, -0.02), torch.tensor([0, 0, 0, 1])
    mask = torch.tensor([True, False, True, True])
    advantages = doubles(2.0, 9.0, 4.0, -1.0)  # mean of sequence 0: 3
    up, down = math.exp(0.02), math.exp(-0.02)
    found = gspo(log_ratios, advantages, mask, ids, 0.05, 0.05)
    assert found.tolist() == pytest.approx([-3 * up, 0.0, -3 * up, down], rel=1e-12)
    found = gspo(log_ratios, advantages, mask, ids, 0.01, 0.015)  # both clipped: 1.015 and 0.99
    assert found.tolist() == pytest.approx([-3 * 1.015, 0.0, -3 * 1.015, 0.99], rel=1e-12)
    assert gspo_clipped(log_ratios, advantages, mask, ids, 0.01, 0.015).tolist() == [True, False, True, True]
    assert gspo_clipped(log_ratios, advantages, mask, ids, 0.05, 0.05).tolist() == [False] * 4
    found = gspo_token(log_ratios, advantages, mask, ids, 0.05, 0.05)
    assert found.tolist() == pytest.approx([-2 * up, 0.0, -4 * up, down], rel=1e-12)
    assert gspo_token_clipped(log_ratios, -advantages, mask, ids, 0.01, 0.015).tolist() == [False] * 4
    assert gspo_token_clipped(log_ratios, advantages, mask, ids, 0.01, 0.015).tolist() == [True, False, True, True]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("spread", "low", "high"), [(0.01, 3e-4, 4e-4), (0.5, 0.2, 0.3), (40.0, 0.2, 0.3)])
def test_equals_a_plain_twin(seed: int, spread: float, low: float, high: float):
    lists = ragged(seed, spread)
    tensors = doubles(*lists[0]), doubles(*lists[1]), torch.tensor(lists[2]), torch.tensor(lists[3])
    whole, token, clipped, token_clipped = plain(*lists, low, high)
    assert gspo(*tensors, low, high).tolist() == pytest.approx(whole, rel=1e-12)
    assert gspo_token(*tensors, low, high).tolist() == pytest.approx(token, rel=1e-12)
    assert gspo_clipped(*tensors, low, high).tolist() == clipped
    assert gspo_token_clipped(*tensors, low, high).tolist() == token_clipped


@pytest.mark.parametrize("function", [gspo, gspo_clipped, gspo_token, gspo_token_clipped])
def test_the_bounds_are_those_of_the_paper_by_default(function: object):
    assert callable(function)
    parameters = inspect.signature(function).parameters
    assert (parameters["clip_low"].default, parameters["clip_high"].default) == (3e-4, 4e-4)


def test_sequences_of_one_token_are_ppo():
    numbers = torch.Generator().manual_seed(0)
    log_ratios = torch.randn(50, dtype=torch.float64, generator=numbers)
    advantages = torch.randn(50, dtype=torch.float64, generator=numbers)
    mask, ids = torch.ones(50, dtype=torch.bool), torch.arange(50)
    expected = ppo_clip(log_ratios, advantages, 0.2, 0.3)
    for function in (gspo, gspo_token):
        torch.testing.assert_close(function(log_ratios, advantages, mask, ids, 0.2, 0.3), expected, rtol=0, atol=0)
    for function in (gspo_clipped, gspo_token_clipped):
        assert torch.equal(
            function(log_ratios, advantages, mask, ids, 0.2, 0.3), ppo_clipped(log_ratios, advantages, 0.2, 0.3)
        )


def gradients(function: object, inputs: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    assert callable(function)
    leaf = inputs[0].clone().requires_grad_()
    aggregation.weighted_sum(weights, function(leaf, *inputs[1:], 0.2, 0.3)).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("seed", range(10))
def test_both_forms_have_one_gradient_where_a_sequence_has_one_advantage(seed: int):
    lists = ragged(seed, 0.2)
    mask, ids = torch.tensor(lists[2]), torch.tensor(lists[3])
    per_sequence = torch.randn(len(ids) + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = doubles(*lists[0]), per_sequence[ids], mask, ids
    weights = aggregation.sequence_mean_token_mean(mask, ids, 6, dtype=torch.float64)
    torch.testing.assert_close(
        gradients(gspo, inputs, weights), gradients(gspo_token, inputs, weights), rtol=1e-12, atol=1e-15
    )
    assert torch.equal(gspo_clipped(*inputs, 0.2, 0.3), gspo_token_clipped(*inputs, 0.2, 0.3))


def test_the_gradient_of_a_sequence_is_spread_evenly_in_one_form_and_not_in_the_other():
    log_ratios, advantages = doubles(0.03, -0.05, 0.02), doubles(1.0, 2.0, 6.0)
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    inputs, weights = (log_ratios, advantages, mask, ids), doubles(1.0, 1.0, 1.0)
    # s = exp(0): whole sequence: 3 losses of -3 s, each token a third of each; token form: own advantage
    assert gradients(gspo, inputs, weights).tolist() == pytest.approx([-3.0, -3.0, -3.0], rel=1e-12)
    assert gradients(gspo_token, inputs, weights).tolist() == pytest.approx([-1.0, -2.0, -6.0], rel=1e-12)


def test_pitfall_6_nan_at_masked_positions_reaches_neither_loss_nor_gradient():
    for seed in range(5):
        lists = ragged(seed, 0.2)
        inputs = doubles(*lists[0]), doubles(*lists[1]), torch.tensor(lists[2]), torch.tensor(lists[3])
        for function in (gspo, gspo_token):
            leaf = inputs[0].clone().requires_grad_()
            losses = function(leaf, *inputs[1:], 0.2, 0.3)
            losses.sum().backward()
            assert leaf.grad is not None
            assert bool(losses.isfinite().all())
            assert bool(leaf.grad.isfinite().all())
            assert bool((leaf.grad[~inputs[2]] == 0).all())


def test_padding_counts_nowhere_even_if_the_mask_forgets_it():
    log_ratios, advantages = doubles(0.1, 0.2, 5.0), doubles(1.0, 1.0, 7.0)
    mask, ids = torch.tensor([True, True, True]), torch.tensor([0, 0, -1])
    for function in (gspo, gspo_token):
        found = function(log_ratios, advantages, mask, ids, 0.5, 0.5)
        assert found.tolist() == pytest.approx([-math.exp(0.15)] * 2 + [0.0])
    assert gspo_token_clipped(log_ratios, advantages, mask, ids).tolist() == [True, True, False]


def test_gradients_are_right():
    log_ratios = torch.linspace(-0.4, 0.5, 10, dtype=torch.float64, requires_grad=True)
    mask, ids = torch.tensor([True] * 8 + [False, True]), torch.tensor([2, 2, 2, 0, 0, 1, 1, 1, 1, 1])
    for sign in (1.0, -1.0):
        advantages = sign * torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda x, a=advantages: gspo(x, a, mask, ids, 0.15, 0.25), (log_ratios,), raise_exception=True
        )


def test_a_mask_of_another_type_or_length_is_refused():
    x, ids = doubles(0.0, 0.0), torch.tensor([0, 0])
    with pytest.raises(InputError, match="loss_mask_T must be bool"):
        gspo(x, x, torch.tensor([1.0, 1.0]), ids)
    with pytest.raises(InputError, match="segment ids"):
        gspo(x, x, torch.tensor([True]), ids)
