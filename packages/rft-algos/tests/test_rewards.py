from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.rewards import kl_penalised

TOKENS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(-2, 2)), max_size=20)


def test_hand_computed_penalty():
    penalised = kl_penalised(
        torch.tensor([1.0, 0.0]),
        torch.tensor([0.5, 0.25, 1.0, -0.5]),
        torch.tensor([True, True, True, True]),
        torch.tensor([0, 0, 1, 1]),
        coefficient=0.1,
    )
    assert penalised.tolist() == pytest.approx([1.0 - 0.1 * 0.75, 0.0 - 0.1 * 0.5])


@given(TOKENS)
def test_equals_a_plain_twin_on_ragged_sequences(tokens: list[tuple[int, bool, float]]):
    rewards = [0.5, -1.0, 0.0, 2.0]
    expected = [
        reward - 0.3 * math.fsum(value for i, kept, value in tokens if kept and i == index)
        for index, reward in enumerate(rewards)
    ]
    penalised = kl_penalised(
        torch.tensor(rewards),
        torch.tensor([value for *_, value in tokens], dtype=torch.float64),
        torch.tensor([kept for _, kept, _ in tokens], dtype=torch.bool),
        torch.tensor([i for i, *_ in tokens], dtype=torch.int64),
        coefficient=0.3,
    )
    assert penalised.tolist() == pytest.approx(expected, abs=1e-12)


def test_masked_tokens_count_nothing_whatever_stands_there():
    penalised = kl_penalised(
        torch.tensor([1.0]),
        torch.tensor([math.nan, 2.0, math.inf], requires_grad=True),
        torch.tensor([False, True, False]),
        torch.tensor([-1, 0, 99]),
        coefficient=0.5,
    )
    assert penalised.tolist() == [0.0]
    assert not penalised.requires_grad
    assert penalised.dtype == torch.float64


def test_coefficient_zero_leaves_the_rewards():
    rewards = torch.tensor([0.25, -3.0])
    index = torch.tensor([0, 1])
    mask = torch.ones(2, dtype=torch.bool)
    assert torch.equal(kl_penalised(rewards, torch.ones(2), mask, index, coefficient=0.0), rewards.double())
