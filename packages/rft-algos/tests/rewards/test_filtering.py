from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.rewards.filtering import (
    DynamicSamplingRefill,
    accuracy_between,
    fraction_with_variance,
    has_reward_variance,
)
from rft_core.errors import OptionsError

REWARD = st.sampled_from([0.0, 1.0, 0.1, 0.3, -2.0])
GROUPED_REWARDS = st.lists(st.tuples(st.integers(-3, 3), REWARD), max_size=24)


def tensors(rows: list[tuple[int, float]], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([r for _, r in rows], dtype=dtype)
    return rewards, torch.tensor([g for g, _ in rows], dtype=torch.int64)


def mates(rows: list[tuple[int, float]], group: int) -> list[float]:
    return [r for g, r in rows if g == group]


# signal


def test_groups_of_one_reward_have_no_signal():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0])
    groups = torch.tensor([7, -2, 7, -2, 4, 0, 0])
    # 7: 1, 1; -2: 0, 1; 4: alone; 0: 0, 0
    signal = has_reward_variance(rewards, groups)
    assert signal.dtype == torch.bool
    assert signal.tolist() == [False, True, False, True, False, False, False]
    total, count = fraction_with_variance(rewards, groups)
    assert (float(total), float(count)) == (1.0, 4.0)
    assert total.dtype == count.dtype == torch.float64
    assert total.shape == count.shape == ()


@given(GROUPED_REWARDS)
def test_signal_equals_a_plain_twin(rows: list[tuple[int, float]]):
    expected = [len(set(mates(rows, group))) > 1 for group, _ in rows]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert has_reward_variance(*tensors(rows, dtype)).tolist() == expected
    groups = {g for g, _ in rows}
    total, count = fraction_with_variance(*tensors(rows))
    assert float(total) == sum(len(set(mates(rows, group))) > 1 for group in groups)
    assert float(count) == len(groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0 / 3.0, -5.3])
def test_pitfall_1_identical_rewards_have_no_signal_whatever_their_value(reward: float, dtype: torch.dtype):
    for size in (1, 2, 7, 64):
        rewards = torch.full((size,), reward, dtype=dtype)
        assert has_reward_variance(rewards, torch.ones(size, dtype=torch.int64)).tolist() == [False] * size


def test_the_smallest_difference_is_a_signal():
    rewards = torch.tensor([1.0, 1.0 + 2**-52], dtype=torch.float64)
    assert has_reward_variance(rewards, torch.tensor([3, 3])).tolist() == [True, True]
    assert has_reward_variance(torch.tensor([3, 4]), torch.tensor([0, 0])).tolist() == [True, True]  # integers too


def test_the_order_of_sequences_does_not_matter():
    source = random.Random(2)
    rows = [(source.randrange(6), source.choice([0.0, 0.1, 1.0])) for _ in range(40)]
    signal = has_reward_variance(*tensors(rows)).tolist()
    between = accuracy_between(*tensors(rows), 0.2, 0.6).tolist()
    order = list(range(40))
    source.shuffle(order)
    shuffled = [rows[i] for i in order]
    assert has_reward_variance(*tensors(shuffled)).tolist() == [signal[i] for i in order]
    assert accuracy_between(*tensors(shuffled), 0.2, 0.6).tolist() == [between[i] for i in order]
    assert [float(x) for x in fraction_with_variance(*tensors(shuffled))] == [
        float(x) for x in fraction_with_variance(*tensors(rows))
    ]


def test_whole_groups_on_two_ranks_add_up():
    rows = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    parts = [fraction_with_variance(*tensors(rows[:2])), fraction_with_variance(*tensors(rows[2:]))]
    together = [float(a + b) for a, b in zip(*parts, strict=True)]
    assert together == [float(x) for x in fraction_with_variance(*tensors(rows))] == [2.0, 3.0]


def test_a_penalty_for_length_makes_right_answers_look_informative():
    # the module's advice: filter on rewards before shaping
    right, groups = torch.tensor([1.0, 1.0]), torch.tensor([0, 0])
    assert has_reward_variance(right, groups).tolist() == [False, False]
    assert has_reward_variance(right - torch.tensor([0.0, 0.2]), groups).tolist() == [True, True]


# accuracy


def test_accuracy_by_hand_with_both_bounds_included():
    # group 0: 1/4, group 1: 1/2, group 2: 1, group 3: 0
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    kept = accuracy_between(rewards, groups, 0.25, 0.5)
    assert kept.dtype == torch.bool
    assert kept.tolist() == [True] * 6 + [False, False]
    assert accuracy_between(rewards, groups, 0.26, 0.5).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert accuracy_between(rewards, groups, 0.25, 0.49).tolist() == [True] * 4 + [False] * 4
    assert accuracy_between(rewards, groups, 0.0, 1.0).tolist() == [True] * 8
    assert accuracy_between(rewards, groups, 0.5, 0.5).tolist() == [False] * 4 + [True] * 2 + [False] * 2


@given(GROUPED_REWARDS, st.sampled_from([(0.0, 1.0), (0.2, 0.8), (-1.0, 0.3), (0.1, 0.1)]))
def test_accuracy_equals_a_plain_twin(rows: list[tuple[int, float]], bounds: tuple[float, float]):
    low, high = bounds
    expected = []
    for group, _ in rows:
        mean = math.fsum(mates(rows, group)) / len(mates(rows, group))
        expected.append(low - 1e-9 <= mean <= high + 1e-9)
    assert accuracy_between(*tensors(rows), low, high).tolist() == expected


@pytest.mark.parametrize("size", [3, 7, 10, 49, 1000])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
def test_the_rounding_of_a_mean_does_not_cross_a_bound(size: int, reward: float):
    rewards, groups = torch.full((size,), reward, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    assert bool(accuracy_between(rewards, groups, reward, reward).all())
    assert not bool(accuracy_between(rewards, groups, reward + 1e-8, 1.0).any())
    assert not bool(accuracy_between(rewards, groups, 0.0, reward - 1e-8).any())


def test_a_mean_within_a_billionth_of_a_bound_counts_as_the_bound():
    def keeps(reward: float, low: float, high: float) -> bool:
        rewards = torch.tensor([reward], dtype=torch.float64)
        return bool(accuracy_between(rewards, torch.tensor([0]), low, high))

    assert [keeps(x, 0.0, 1.0) for x in (-1e-9, -1.01e-9)] == [True, False]
    assert [keeps(x, -1.0, 0.0) for x in (1e-9, 1.01e-9)] == [True, False]


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(InputError, match="is above"):
        accuracy_between(torch.tensor([1.0]), torch.tensor([0]), 0.8, 0.2)


def test_no_sequences_give_nothing():
    rewards, groups = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert has_reward_variance(rewards, groups).tolist() == []
    assert accuracy_between(rewards, groups, 0.0, 1.0).tolist() == []
    assert [float(x) for x in fraction_with_variance(rewards, groups)] == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pitfall_5_a_reward_that_failed_is_refused(bad: float):
    rewards, groups = torch.tensor([1.0, bad]), torch.tensor([0, 0])
    with pytest.raises(InputError, match="must be dropped"):
        has_reward_variance(rewards, groups)
    with pytest.raises(InputError, match="must be dropped"):
        accuracy_between(rewards, groups, 0.0, 1.0)


def test_wrong_shapes_are_refused():
    with pytest.raises(InputError, match="must be a vector"):
        has_reward_variance(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="group ids"):
        has_reward_variance(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


# how many more


def test_the_example_of_refill():
    refill = DynamicSamplingRefill(wanted=64, max_rounds=3)
    assert refill.prompts_to_sample(0, 0) == 64
    assert refill.prompts_to_sample(50, 1) == 14
    assert refill.prompts_to_sample(60, 2) == 4
    assert refill.prompts_to_sample(63, 3) == 0
    assert refill.is_exhausted(63, 3)


def test_enough_is_enough_and_more_is_no_debt():
    refill = DynamicSamplingRefill(wanted=8, max_rounds=2)
    assert [refill.missing(n) for n in (0, 7, 8, 11)] == [8, 1, 0, 0]
    assert refill.prompts_to_sample(8, 1) == 0
    assert refill.prompts_to_sample(11, 1) == 0
    assert [refill.is_exhausted(n, 2) for n in (7, 8, 11)] == [True, False, False]
    assert [refill.is_exhausted(0, rounds) for rounds in (0, 1, 2, 3)] == [False, False, True, True]


@given(st.integers(1, 40), st.integers(1, 6), st.floats(0, 1), st.integers(0, 10**6))
def test_a_loop_keeps_what_is_wanted_or_uses_up_its_rounds(wanted: int, max_rounds: int, rate: float, seed: int):
    refill, source = DynamicSamplingRefill(wanted, max_rounds), random.Random(seed)
    kept = rounds = 0
    while num_prompts := refill.prompts_to_sample(kept, rounds):
        assert num_prompts == wanted - kept
        kept += sum(source.random() < rate for _ in range(num_prompts))
        rounds += 1
    assert kept <= wanted
    assert rounds <= max_rounds
    assert refill.is_exhausted(kept, rounds) == (kept < wanted)
    assert kept == wanted or rounds == max_rounds


@pytest.mark.parametrize("field", ["wanted", "max_rounds"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_number_below_one_is_refused_with_its_name(field: str, value: int):
    with pytest.raises(OptionsError, match=f"{field} = {value}") as caught:
        DynamicSamplingRefill(**{"wanted": 4, "max_rounds": 4, field: value})
    assert caught.value.problem.code == "filtering.refill"
    assert caught.value.problem.do == f"{field}=1"
    assert DynamicSamplingRefill(wanted=1, max_rounds=1).prompts_to_sample(0, 0) == 1


def test_a_refill_is_a_frozen_record():
    refill = DynamicSamplingRefill(wanted=4, max_rounds=2)
    assert refill == DynamicSamplingRefill(4, 2)
    with pytest.raises(FrozenInstanceError):
        refill.wanted = 5  # type: ignore[misc]
