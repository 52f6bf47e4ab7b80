from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.advantages import gdpo
from rft_algos.input_checks import InputError
from rft_algos.rewards.kl_penalty import clip_rewards, combine, combine_normalised, kl_penalised, token_rewards

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
        torch.tensor([1.0], requires_grad=True),
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


Tokens = list[list[tuple[bool, float]]]
PACKED = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-2, 2)), max_size=5), max_size=4)


def packed(sequences: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates, mask and ids; NaN where masked, a padding token after every sequence of odd number."""
    tokens: list[tuple[float, bool, int]] = []
    for index, sequence in enumerate(sequences):
        tokens += [(kl if kept else math.nan, kept, index) for kept, kl in sequence]
        tokens += [(math.nan, False, -1)] * (index % 2)
    return (
        torch.tensor([kl for kl, *_ in tokens], dtype=torch.float64),
        torch.tensor([kept for _, kept, _ in tokens], dtype=torch.bool),
        torch.tensor([index for *_, index in tokens], dtype=torch.int64),
    )


def test_token_rewards_by_hand():
    # prompt, 0.5, observation, 0.25 | 1, with rewards 2 and -1: -0.1 * 0.5; -0.1 * 0.25 + 2; -0.1 - 1
    result = token_rewards(
        torch.tensor([2.0, -1.0]),
        torch.tensor([math.nan, 0.5, math.inf, 0.25, 1.0]),
        torch.tensor([False, True, False, True, True]),
        torch.tensor([0, 0, 0, 0, 1]),
        coefficient=0.1,
    )
    assert result.tolist() == pytest.approx([0.0, -0.05, 0.0, 1.975, -1.1], rel=1e-12)


@given(PACKED)
def test_pitfall_6_token_rewards_equal_a_plain_twin_with_nan_at_masked_positions(sequences: Tokens):
    rewards = [0.5, -1.0, 0.0, 2.0]
    expected: list[float] = []
    for index, sequence in enumerate(sequences):
        for position, (kept, kl) in enumerate(sequence):
            is_last = kept and not any(later for later, _ in sequence[position + 1 :])
            expected.append((-0.3 * kl if kept else 0.0) + (rewards[index] if is_last else 0.0))
        expected += [0.0] * (index % 2)
    result = token_rewards(torch.tensor(rewards), *packed(sequences), coefficient=0.3)
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(PACKED)
def test_token_rewards_of_a_sequence_add_up_to_its_penalised_reward(sequences: Tokens):
    kl, mask, ids = packed(sequences)
    rewards = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    token_level = token_rewards(rewards, kl, mask, ids, coefficient=0.3)
    sequence_level = kl_penalised(rewards, kl, mask, ids, coefficient=0.3)
    for index, sequence in enumerate(sequences):
        if any(kept for kept, _ in sequence):
            assert float(token_level[ids == index].sum()) == pytest.approx(float(sequence_level[index]), abs=1e-12)


@pytest.mark.parametrize("mask", [[True, True], [False, True]])
def test_token_rewards_are_float64_without_gradient_and_leave_their_inputs(mask: list[bool]):
    rewards = torch.tensor([1.0], requires_grad=True)
    kl = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    result = token_rewards(rewards, kl, torch.tensor(mask), torch.zeros(2, dtype=torch.int64), coefficient=0.5)
    assert result.tolist() == [-0.25 * mask[0], 0.75]
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert kl.tolist() == [0.5, 0.5]


def test_token_rewards_of_float32_estimates():
    kl, mask, ids = torch.tensor([0.1, 0.2]), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    result = token_rewards(torch.tensor([1.0]), kl, mask, ids, coefficient=0.1)
    assert result.tolist() == pytest.approx([-0.01, 0.98], rel=1e-5)


def test_token_rewards_may_be_empty_or_fully_masked():
    none = torch.empty(0, dtype=torch.int64)
    assert token_rewards(torch.empty(0), torch.empty(0), none.bool(), none, coefficient=1.0).shape == (0,)
    masked = token_rewards(
        torch.tensor([1.0]), torch.tensor([math.nan]), torch.tensor([False]), torch.tensor([0]), coefficient=1.0
    )
    assert masked.tolist() == [0.0]


def test_token_rewards_refuse_what_does_not_fit():
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="estimates"):
        token_rewards(torch.ones(1), torch.ones(3), mask, ids, coefficient=1.0)
    with pytest.raises(InputError, match="segment ids"):
        token_rewards(torch.ones(1), torch.ones(2), mask, ids[:1], coefficient=1.0)
    with pytest.raises(InputError, match="must be bool"):
        token_rewards(torch.ones(1), torch.ones(2), ids, ids, coefficient=1.0)
    with pytest.raises(InputError, match="must be bool"):
        kl_penalised(torch.ones(1), torch.ones(2), ids, ids, coefficient=1.0)


def test_components_are_combined_in_float64_without_gradient():
    components = torch.tensor([[1.0, 2.0], [0.5, -4.0]], requires_grad=True)
    combined = combine(components, torch.tensor([2.0, 0.25], requires_grad=True))
    assert combined.tolist() == [2.5, 0.0]
    assert combined.dtype == torch.float64
    assert not combined.requires_grad


def test_normalised_components_are_combined_by_hand():
    # each component is +-sqrt(1/2) whatever its scale: 2 sqrt(1/2) - sqrt(1/2)
    components = torch.tensor([[1.0, 0.0], [0.0, 100.0]])
    combined = combine_normalised(components, torch.tensor([2.0, 1.0]), torch.tensor([5, 5]), epsilon=1e-12)
    assert combined.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-9)


def test_normalised_components_are_gdpo_with_the_same_default_epsilon():
    components = torch.tensor([[0.0, 1e-6], [1e-6, 0.0], [2e-6, 3e-6]])
    weights, groups = torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 0])
    assert torch.equal(combine_normalised(components, weights, groups), gdpo(components, groups, weights))


def test_rewards_are_clipped_on_both_sides():
    clipped = clip_rewards(torch.tensor([-3.0, -1.5, 0.0, 1.5, 2.0], requires_grad=True), 1.5)
    assert clipped.tolist() == [-1.5, -1.5, 0.0, 1.5, 1.5]
    assert clipped.dtype == torch.float64
    assert not clipped.requires_grad
    assert clip_rewards(torch.ones(1), 0.25).tolist() == [0.25]
    with pytest.raises(InputError, match="must be positive: 0"):
        clip_rewards(torch.ones(1), 0.0)
