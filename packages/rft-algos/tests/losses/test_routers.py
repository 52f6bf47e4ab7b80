"""Equations of routers, by hand and beside a plain twin."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.losses.routers import balanced_bias, dead_experts, load_entropy, max_violation, router_z_loss


def doubles(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_z_loss_is_the_square_and_pulls_the_logits_towards_a_normaliser_of_1() -> None:
    logits = doubles([math.log(2.0), math.log(3.0)], [math.log(0.25), math.log(0.75)]).requires_grad_()
    losses = router_z_loss(logits.logsumexp(-1))
    torch.testing.assert_close(losses, doubles(math.log(5.0) ** 2, 0.0))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    # 2 log Z times the probabilities
    torch.testing.assert_close(gradient, doubles([0.8 * math.log(5.0), 1.2 * math.log(5.0)], [0.0, 0.0]))


def test_the_bias_rises_by_the_sign_of_what_is_missing_and_keeps_its_mean() -> None:
    bias, loads = doubles([0.1, 0.0, -0.1, 0.0]), doubles([10, 4, 1, 1])  # the mean is 4
    # signs -1, 0, 1, 1; their mean is 0.25
    expected = doubles([0.1 - 0.0125, -0.0025, -0.1 + 0.0075, 0.0075])
    torch.testing.assert_close(balanced_bias(bias, loads, 0.01), expected)
    torch.testing.assert_close(balanced_bias(bias, loads, 0.0), bias)
    assert balanced_bias(bias.float(), loads, 0.01).dtype == torch.float32
    with pytest.raises(InputError, match="rate"):
        balanced_bias(bias, loads, -0.1)


def test_the_bias_is_the_twins() -> None:
    source = random.Random(3)
    loads = [[float(source.randrange(9)) for _ in range(6)] for _ in range(4)]
    bias = [[source.gauss(0, 1) for _ in range(6)] for _ in range(4)]
    expected = []
    for row, old in zip(loads, bias, strict=True):
        mean = sum(row) / 6
        signs = [(mean > load) - (mean < load) for load in row]
        expected.append([before + 0.3 * (sign - sum(signs) / 6) for before, sign in zip(old, signs, strict=True)])
    torch.testing.assert_close(balanced_bias(doubles(*bias), doubles(*loads), 0.3), doubles(*expected))


def test_a_skewed_router_is_balanced_by_its_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    skew, bias = torch.linspace(-1, 1, 8), torch.zeros(1, 8)
    found = []
    for _ in range(150):
        scores = (torch.randn(512, 8, generator=generator) + skew).sigmoid()
        chosen = (scores + bias).topk(2, dim=-1).indices
        loads = torch.bincount(chosen.flatten(), minlength=8)[None].double()
        found.append(float(max_violation(loads)))
        bias = balanced_bias(bias, loads, 0.01)
    assert found[0] > 1
    assert max(found[-10:]) < 0.3


def test_measures_of_loads_by_hand() -> None:
    loads = doubles([2, 2, 2, 2], [8, 0, 0, 0], [4, 3.9, 0.1, 0])
    torch.testing.assert_close(max_violation(loads), doubles(0, 3, 1))
    entropy = load_entropy(loads)
    torch.testing.assert_close(entropy[:2], doubles(1, 0))
    shares = (0.5, 0.4875, 0.0125)
    assert float(entropy[2]) == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4))
    # 0.05 of the mean of 2 is 0.1
    assert dead_experts(loads).sum(-1).tolist() == [0, 3, 1]
