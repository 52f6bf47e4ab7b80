"""VESPO, TOPR and DRO of sequences against their equations in plain loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.components import DroSequence, Topr, Vespo
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.input_checks import InputError
from rft_algos.objectives import policy_loss
from rft_algos.surrogates import dro_sequence, topr, vespo
from rft_core.errors import OptionsError

D = torch.float64
LENGTHS = (3, 1, 5, 2)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    numbers = random.Random(seed)
    ids = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    mask = [numbers.random() < 0.8 for _ in ids]
    floats = [[numbers.gauss(-2, 1) for _ in ids], [numbers.gauss(0, 0.7) for _ in ids]]
    advantages = [numbers.gauss(0, 1) for _ in LENGTHS]
    floats.append([advantages[i] for i in ids])
    logprobs, log_ratio, advantages_T = (torch.tensor(x, dtype=D) for x in floats)
    return logprobs, log_ratio, advantages_T, torch.tensor(mask), torch.tensor(ids)


def weight_of(kind: str, total: float, advantage: float) -> float:
    if kind == "topr":
        return 1.0 if advantage > 0 else min(math.exp(total), 1.0)
    k, rate = (2.0, 3.0) if advantage > 0 else (3.0, 2.0)
    return math.exp(total) ** k * math.exp(rate * (1 - math.exp(total)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["vespo", "topr"])
def test_values_and_gradients_are_those_of_loops(kind: str, seed: int) -> None:
    logprobs, log_ratio, advantages, mask, ids = batch(seed)
    leaf = logprobs.clone().requires_grad_()
    ratios = (log_ratio + 0 * leaf) if kind == "vespo" else log_ratio
    found = (vespo if kind == "vespo" else topr)(leaf, ratios, advantages, mask, ids)
    found[mask].sum().backward()
    assert leaf.grad is not None
    for t in range(len(ids)):
        if mask[t]:
            own = mask & (ids == ids[t])
            weight = weight_of(kind, float(log_ratio[own].sum()), float(advantages[t]))
            assert float(found[t].detach()) == pytest.approx(-weight * float(advantages[t] * logprobs[t]), rel=1e-10)
            # the weight is a constant
            assert float(leaf.grad[t]) == pytest.approx(-weight * float(advantages[t]), rel=1e-10)


def test_hand_computed_weights() -> None:
    one, ids, mask = torch.ones(2, dtype=D), torch.tensor([0, 0]), torch.tensor([True, True])
    log_ratio = torch.full((2,), math.log(2) / 2, dtype=D)  # the product is 2
    assert vespo(one, log_ratio, one, mask, ids).tolist() == pytest.approx([-4 * math.exp(-3)] * 2)
    assert vespo(one, log_ratio, -one, mask, ids).tolist() == pytest.approx([8 * math.exp(-2)] * 2)
    assert topr(one, log_ratio, -one, mask, ids).tolist() == [1.0, 1.0]
    assert topr(one, -log_ratio, -one, mask, ids).tolist() == pytest.approx([0.5, 0.5])
    assert topr(one, -log_ratio, one, mask, ids).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("seed", range(4))
def test_dro_of_sequences_squares_the_log_ratio_of_the_response(seed: int) -> None:
    logprobs, log_ratio, advantages, mask, ids = batch(seed)
    old, tau = logprobs - log_ratio, 0.3
    leaf = logprobs.clone().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return dro_sequence(x, x - old, advantages, mask, ids, tau)[mask].sum()

    assert torch.autograd.gradcheck(loss, (leaf,))
    expected = 0.0
    for i in range(len(LENGTHS)):
        own = mask & (ids == i)
        expected += tau / 2 * float(log_ratio[own].sum()) ** 2 - float((advantages * logprobs)[own].sum())
    assert float(loss(leaf).detach()) == pytest.approx(expected, rel=1e-12)
    # the papers' square, (A - tau log ratio)^2 / (2 tau), differs by a constant of each response
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    square = torch.zeros((), dtype=D)
    for i in range(len(LENGTHS)):
        own = mask & (ids == i)
        if bool(own.any()):
            square = square + (advantages[own][0] - tau * (leaf - old)[own].sum()).square() / (2 * tau)
    (expected_gradient,) = torch.autograd.grad(square, leaf)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_masked_nan_reaches_no_other_token_and_no_gradient_of_records() -> None:
    logprobs, log_ratio, advantages, mask, ids = batch(1)
    mask[2] = False
    for choice in (Vespo(), Topr(), DroSequence()):
        results = []
        for value in (math.nan, -1.0):
            leaf = torch.where(mask, logprobs, value).requires_grad_()
            output = policy_loss(
                PolicyAlgorithm(surrogate=choice),
                logprobs_T=leaf,
                old_logprobs_T=torch.where(mask, logprobs - log_ratio, value),
                advantages_T=advantages,
                loss_mask_T=mask,
                segment_ids_T=ids,
                num_loss_tokens=9,
                num_sequences=4,
            )
            results.append((float(output.loss.detach()), torch.autograd.grad(output.loss, leaf)[0]))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])
        assert PolicyAlgorithm(surrogate=choice).has_other_terms == isinstance(choice, DroSequence)


def test_numbers_outside_their_range_are_refused() -> None:
    one, ids, mask = torch.ones(1), torch.tensor([0]), torch.tensor([True])
    with pytest.raises(InputError, match="k_positive"):
        vespo(one, one, one, mask, ids, positive=(-1.0, 1.0))
    with pytest.raises(OptionsError, match="lambda_negative"):
        Vespo(lambda_negative=0.0)
