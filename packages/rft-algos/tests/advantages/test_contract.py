from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.advantages import group_norm
from rft_algos.input_checks import InputError

GROUPED_REWARDS = st.lists(st.tuples(st.integers(-3, 3), st.floats(-10, 10)), min_size=1, max_size=24)


def plain_group_norm(rewards: list[float], groups: list[int], epsilon: float) -> list[float]:
    advantages: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if max(mates) == min(mates):
            advantages.append(0.0)
        else:
            advantages.append((reward - math.fsum(mates) / len(mates)) / (statistics.stdev(mates) + epsilon))
    return advantages


def test_one_success_of_four_gives_hand_computed_values():
    # mean 1/4, sum of squares 9/16 + 3/16 = 3/4, variance (3/4) / 3 = 1/4, std 1/2
    advantages = group_norm(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), epsilon=1e-12)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-10)


def test_epsilon_is_added_to_the_standard_deviation():
    advantages = group_norm(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), epsilon=0.5)
    assert advantages.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25], rel=1e-12)


@given(GROUPED_REWARDS, st.sampled_from([1e-6, 1e-3, 1.0]))
def test_equals_a_plain_twin_on_ragged_groups_in_any_order(rows: list[tuple[int, float]], epsilon: float):
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    advantages = group_norm(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), epsilon=epsilon)
    assert advantages.tolist() == pytest.approx(plain_group_norm(rewards, groups, epsilon), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0 / 3.0, -5.3])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-12])
def test_identical_rewards_give_exactly_zero(reward: float, dtype: torch.dtype, epsilon: float):
    for size in (2, 3, 7, 8, 64):
        advantages = group_norm(
            torch.full((size,), reward, dtype=dtype), torch.ones(size, dtype=torch.int64), epsilon=epsilon
        )
        assert advantages.tolist() == [0.0] * size


def test_a_small_spread_far_from_zero_keeps_its_digits():
    rewards = torch.tensor([1e6 + 0.01, 1e6, 1e6, 1e6], dtype=torch.float64)
    advantages = group_norm(rewards, torch.zeros(4, dtype=torch.int64), epsilon=1e-12)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-6)


def test_a_group_of_one_gets_zero_beside_a_group_with_spread():
    advantages = group_norm(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([7, 3, 3]), epsilon=1e-12)
    assert advantages.tolist() == pytest.approx([0.0, math.sqrt(0.5), -math.sqrt(0.5)])


@given(GROUPED_REWARDS)
def test_advantages_of_a_group_add_up_to_zero(rows: list[tuple[int, float]]):
    groups = torch.tensor([g for g, _ in rows])
    advantages = group_norm(torch.tensor([r for _, r in rows], dtype=torch.float64), groups)
    for group in groups.unique():
        assert float(advantages[groups == group].sum()) == pytest.approx(0.0, abs=1e-6)


def test_ids_may_be_large_negative_and_unsorted():
    ids = torch.tensor([2**60, -5, 2**60, -5])
    advantages = group_norm(torch.tensor([1.0, 0.0, 0.0, 1.0]), ids, epsilon=1e-12)
    half = math.sqrt(0.5)
    assert advantages.tolist() == pytest.approx([half, -half, -half, half])


def test_result_is_float64_without_gradient_and_empty_for_no_sequences():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    advantages = group_norm(rewards, torch.tensor([0, 0]))
    assert advantages.dtype == torch.float64
    assert not advantages.requires_grad
    assert group_norm(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_integer_rewards_are_accepted():
    assert group_norm(torch.tensor([2, 2, 2]), torch.tensor([0, 0, 0])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(missing: float):
    with pytest.raises(InputError, match="dropped before advantages"):
        group_norm(torch.tensor([1.0, missing]), torch.tensor([0, 0]))
