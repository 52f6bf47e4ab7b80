from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.advantages import discounted_returns, reinforce
from rft_algos.input_checks import InputError

Sequences = list[list[tuple[bool, float]]]
SEQUENCES = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-2, 2)), max_size=6), max_size=5)


def packed(sequences: Sequences, masked: float = math.nan) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, mask and ids, with a padding token after every sequence of odd number."""
    tokens: list[tuple[float, bool, int]] = []
    for index, sequence in enumerate(sequences):
        tokens += [(reward if kept else masked, kept, index) for kept, reward in sequence]
        tokens += [(masked, False, -1)] * (index % 2)
    return (
        torch.tensor([r for r, *_ in tokens], dtype=torch.float64),
        torch.tensor([m for _, m, _ in tokens], dtype=torch.bool),
        torch.tensor([i for *_, i in tokens], dtype=torch.int64),
    )


def plain_returns(sequences: Sequences, gamma: float) -> list[float]:
    result: list[float] = []
    for index, sequence in enumerate(sequences):
        for start, (kept, _) in enumerate(sequence):
            later = [reward for is_loss, reward in sequence[start:] if is_loss]
            result.append(math.fsum(gamma**n * reward for n, reward in enumerate(later)) if kept else 0.0)
        result += [0.0] * (index % 2)
    return result


def test_hand_computed_values_of_two_turns_with_an_observation_between():
    # prompt, 1, 2, observation, 4 | prompt, 8 with gamma 1/2:
    # 4; 2 + 4 / 2 = 4; 1 + 4 / 2 = 3; the second sequence is cut off
    returns = discounted_returns(
        torch.tensor([math.nan, 1.0, 2.0, math.inf, 4.0, math.nan, 8.0]),
        torch.tensor([False, True, True, False, True, False, True]),
        torch.tensor([0, 0, 0, 0, 0, 1, 1]),
        gamma=0.5,
    )
    assert returns.tolist() == [0.0, 3.0, 4.0, 0.0, 4.0, 0.0, 8.0]


@given(SEQUENCES, st.floats(0, 1))
def test_pitfall_6_equals_a_plain_twin_with_nan_at_masked_positions(sequences: Sequences, gamma: float):
    returns = discounted_returns(*packed(sequences), gamma=gamma)
    assert returns.tolist() == pytest.approx(plain_returns(sequences, gamma), rel=1e-12, abs=1e-12)


def test_long_sequences_equal_the_plain_loop():
    lengths, generator = [1, 700, 3, 2500, 64, 128], torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    mask = torch.rand(len(ids), generator=generator) < 0.7
    expected, later = [0.0] * len(ids), 0.0
    for t in reversed(range(len(ids))):
        if t + 1 < len(ids) and ids[t] != ids[t + 1]:
            later = 0.0
        if mask[t]:
            later = expected[t] = float(rewards[t]) + 0.99 * later
    assert discounted_returns(rewards, mask, ids, gamma=0.99).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    in_float32 = discounted_returns(rewards.float(), mask, ids, gamma=0.99)
    assert in_float32.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_without_discount_an_observation_changes_nothing_by_default():
    rewards = torch.tensor([1.0, 5.0, 1.0, 1.0])
    mask = torch.tensor([True, False, True, True])
    assert discounted_returns(rewards, mask, torch.zeros(4, dtype=torch.int64)).tolist() == [3.0, 0.0, 2.0, 1.0]


def test_a_mask_that_is_all_true_gives_the_same_as_one_with_padding():
    rewards, ids = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1])
    dense = discounted_returns(rewards, torch.ones(3, dtype=torch.bool), ids, gamma=0.5)
    assert dense.tolist() == [2.0, 2.0, 3.0]
    padded = discounted_returns(
        torch.cat([rewards, torch.tensor([math.nan])]),
        torch.tensor([True, True, True, False]),
        torch.tensor([0, 0, 1, -1]),
        gamma=0.5,
    )
    assert padded.tolist() == [2.0, 2.0, 3.0, 0.0]


@given(SEQUENCES)
def test_cut_into_micro_batches_that_keep_sequences_whole(sequences: Sequences):
    whole = discounted_returns(*packed(sequences), gamma=0.9).tolist()
    parts: list[float] = []
    for index, sequence in enumerate(sequences):
        parts += discounted_returns(*packed([sequence]), gamma=0.9).tolist() + [0.0] * (index % 2)
    assert parts == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_pitfall_19_fully_masked_rows_and_empty_batches_give_zeros():
    mask = torch.zeros(3, dtype=torch.bool)
    assert discounted_returns(torch.full((3,), math.nan), mask, mask.long()).tolist() == [0.0] * 3
    empty = torch.empty(0)
    assert discounted_returns(empty, torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("mask", [[True, True], [True, False]])
def test_result_is_float64_without_gradient_and_leaves_its_input(mask: list[bool]):
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    returns = discounted_returns(rewards, torch.tensor(mask), torch.zeros(2, dtype=torch.int64))
    assert returns.dtype == torch.float64
    assert not returns.requires_grad
    assert rewards.tolist() == [1.0, 2.0]


def test_reinforce_is_the_return():
    assert reinforce is discounted_returns


def test_what_does_not_fit_is_refused():
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="rewards"):
        discounted_returns(torch.ones(3), mask, ids)
    with pytest.raises(InputError, match="segment ids"):
        discounted_returns(torch.ones(2), mask, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="must be bool"):
        discounted_returns(torch.ones(2), mask.long(), ids)
