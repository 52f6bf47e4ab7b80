"""The losses by name, against the equations written out in loops over rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_algos.objectives import named_losses

D = torch.float64
MASK = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.5, -1.0], [-1.0, -1.0, -1.0]], dtype=D)
MOVED = torch.tensor([[0.3, -0.5, 0.1], [9.0, 0.4, 9.0], [0.0, 0.0, 0.0]], dtype=D)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0], dtype=D)
LOGPROBS = OLD + MOVED


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def rows(loss: object) -> list[list[float]]:
    """Losses of the loss tokens of each row that has one."""
    assert callable(loss)
    return [
        [loss(float(MOVED[i, t]), float(ADVANTAGES[i]), i, t) for t in range(3) if MASK[i, t]]
        for i in range(3)
        if bool(MASK[i].any())
    ]


def token_mean(values: list[list[float]]) -> float:
    return sum(map(sum, values)) / sum(map(len, values))


def sequence_mean(values: list[list[float]]) -> float:
    return sum(sum(row) / len(row) for row in values) / len(values)


def test_grpo_with_and_without_a_reference() -> None:
    values = rows(lambda x, a, i, t: clipped(math.exp(x), a, 0.2, 0.28))
    found = named_losses.grpo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.28)
    assert float(found) == pytest.approx(sequence_mean(values), rel=1e-12)
    penalty = rows(lambda x, a, i, t: math.exp(-0.1) - 1 + 0.1)
    found = named_losses.grpo_loss(
        LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.28, kl_coef=0.5, reference_logprobs_BL=LOGPROBS - 0.1
    )
    assert float(found) == pytest.approx(sequence_mean(values) + 0.5 * sequence_mean(penalty), rel=1e-12)


def test_dapo_and_dr_grpo() -> None:
    values = rows(lambda x, a, i, t: clipped(math.exp(x), a, 0.2, 0.28))
    found = named_losses.dapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK)
    assert float(found) == pytest.approx(token_mean(values), rel=1e-12)
    values = rows(lambda x, a, i, t: clipped(math.exp(x), a, 0.2, 0.2))
    found = named_losses.dr_grpo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, max_tokens=5)
    assert float(found) == pytest.approx(sum(map(sum, values)) / 2 / 5, rel=1e-12)


def test_gspo_and_gmpo() -> None:
    means = [float(MOVED[0].mean()), 0.4]
    expected = sum(clipped(math.exp(m), a, 0.1, 0.2) for m, a in zip(means, [1.0, -0.5], strict=True)) / 2
    found = named_losses.gspo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_low=0.1, clip_high=0.2)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    bounded = [(min(0.3, 0.2) - 0.5 + 0.1) / 3, 0.4]
    found = named_losses.gmpo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)
    assert float(found) == pytest.approx((-math.exp(bounded[0]) + 0.5 * math.exp(bounded[1])) / 2, rel=1e-12)


def test_cispo_sapo_and_reinforce() -> None:
    values = rows(lambda x, a, i, t: -min(math.exp(x), 1.2) * a * float(LOGPROBS[i, t]))
    found = named_losses.cispo_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_high=0.2)
    assert float(found) == pytest.approx(token_mean(values), rel=1e-12)

    def gate(x: float, a: float, i: int, t: int) -> float:
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(x) - 1)))

    found = named_losses.sapo_loss(LOGPROBS, OLD, ADVANTAGES, MASK)
    assert float(found) == pytest.approx(sequence_mean(rows(gate)), rel=1e-12)
    values = rows(lambda x, a, i, t: -a * float(LOGPROBS[i, t]))
    found = named_losses.reinforce_loss(LOGPROBS, ADVANTAGES, MASK)
    assert float(found) == pytest.approx(sum(map(sum, values)) / 2, rel=1e-12)


def test_gradients_reach_the_rows_and_only_their_loss_tokens() -> None:
    def loss(logprobs: Tensor) -> Tensor:
        return named_losses.gspo_loss(logprobs, OLD, ADVANTAGES, MASK, clip_low=0.9, clip_high=3.0)

    leaf = LOGPROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (leaf,))
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    assert (gradient != 0).tolist() == MASK.tolist()
