from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.rewards.shaping import (
    RunningMoments,
    cosine_length_reward,
    kimi_length_reward,
    soft_overlong_penalty,
    stop_properly,
    truncated_keep,
)

REWARDS = st.lists(st.floats(-5, 5), max_size=12)


def test_overlong_penalty_by_hand():
    # free up to 6, full at 10 and beyond
    lengths = torch.tensor([0, 6, 7, 8, 10, 25])
    assert soft_overlong_penalty(lengths, max_length=10, buffer=4).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    half = soft_overlong_penalty(lengths, max_length=10, buffer=4, factor=0.5)
    assert half.tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]
    assert soft_overlong_penalty(lengths, max_length=10, buffer=4).dtype == torch.float64


@given(st.lists(st.integers(0, 40)), st.integers(1, 20), st.floats(0, 2))
def test_overlong_penalty_equals_a_plain_twin(lengths: list[int], buffer: int, factor: float):
    def plain(length: int) -> float:
        if length <= 20 - buffer:
            return 0.0
        return -factor if length > 20 else ((20 - buffer) - length) / buffer * factor

    result = soft_overlong_penalty(torch.tensor(lengths), max_length=20, buffer=buffer, factor=factor)
    assert result.tolist() == pytest.approx([plain(length) for length in lengths], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("buffer", [0, 11])
def test_overlong_buffer_lies_within_the_length(buffer: int):
    with pytest.raises(InputError, match=r"must be in 1\.\.10"):
        soft_overlong_penalty(torch.tensor([1]), max_length=10, buffer=buffer)
    assert soft_overlong_penalty(torch.tensor([5]), max_length=10, buffer=10).tolist() == [-0.5]


def test_stop_properly_scales_truncated_rewards_only():
    rewards = torch.tensor([1.0, 1.0, 0.5], requires_grad=True)
    truncated = torch.tensor([True, False, True])
    result = stop_properly(rewards, truncated, coefficient=0.25)
    assert result.tolist() == [0.25, 1.0, 0.125]
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert stop_properly(rewards, truncated, coefficient=0.0).tolist() == [0.0, 1.0, 0.0]
    assert stop_properly(rewards, truncated, coefficient=1.0).tolist() == [1.0, 1.0, 0.5]


def test_stop_properly_refuses_what_does_not_fit():
    for coefficient in (-0.1, 1.1):
        with pytest.raises(InputError, match="the coefficient must be"):
            stop_properly(torch.ones(1), torch.tensor([True]), coefficient=coefficient)
    with pytest.raises(InputError, match="truncated_N must be bool"):
        stop_properly(torch.ones(1), torch.ones(1), coefficient=0.5)


def test_overlong_filtering_keeps_the_tokens_of_finished_sequences():
    keep = truncated_keep(
        torch.tensor([False, True, False]),
        torch.tensor([True, False, True, True, False, True]),
        torch.tensor([0, 1, 1, 2, -1, 99])[:6].clamp(max=2),
    )
    assert keep.tolist() == [False, False, True, False, False, False]


def test_overlong_filtering_ignores_ids_where_masked():
    mask = torch.tensor([False, True])
    assert truncated_keep(torch.tensor([True]), mask, torch.tensor([99, 0])).tolist() == [False, True]
    everything = truncated_keep(torch.tensor([True, True]), torch.ones(2, dtype=torch.bool), torch.tensor([1, 0]))
    assert everything.tolist() == [True, True]


def test_overlong_filtering_wants_masks():
    with pytest.raises(InputError, match="finished_N must be bool"):
        truncated_keep(torch.tensor([1]), torch.tensor([True]), torch.tensor([0]))
    with pytest.raises(InputError, match="loss_mask_T must be bool"):
        truncated_keep(torch.tensor([True]), torch.tensor([1]), torch.tensor([0]))


def test_cosine_length_reward_by_hand():
    # cos 0 = 1, cos(pi / 3) = 1/2, cos(pi / 2) = 0: shares 1, 3/4, 1/2 of the short value
    correct = torch.tensor([True, True, True, True, True, False, False, False, False])
    lengths = torch.tensor([0, 4, 6, 12, 13, 0, 4, 6, 12])
    result = cosine_length_reward(correct, lengths, max_length=12)
    assert result.tolist() == pytest.approx([2, 1.75, 1.5, -10, -10, -10, -7.5, -5, -10], rel=1e-12)
    assert result.dtype == torch.float64
    named = cosine_length_reward(
        correct, lengths, max_length=12, correct_short=4, correct_long=2, wrong_short=-4, wrong_long=-1, exceeded=-7
    )
    assert named.tolist() == pytest.approx([4, 3.5, 3, -7, -7, -4, -3.25, -2.5, -7], rel=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30))))
def test_cosine_length_reward_equals_a_plain_twin(rows: list[tuple[bool, int]]):
    def plain(correct: bool, length: int) -> float:
        if length >= 25:
            return -10.0
        short, long = (2.0, 1.0) if correct else (-10.0, 0.0)
        return long + 0.5 * (short - long) * (1 + math.cos(length / 25 * math.pi))

    result = cosine_length_reward(
        torch.tensor([c for c, _ in rows], dtype=torch.bool),
        torch.tensor([length for _, length in rows], dtype=torch.int64),
        max_length=25,
    )
    assert result.tolist() == pytest.approx([plain(*row) for row in rows], rel=1e-12, abs=1e-12)


def test_kimi_length_reward_by_hand():
    # group 0: 10 to 30, so 1/2, 0, -1/2; group 1: 1/2 is cut for the wrong answer, -1/2 stays; group 2 is alone
    result = kimi_length_reward(
        torch.tensor([True, True, True, False, False, True]),
        torch.tensor([10, 20, 30, 5, 15, 100]),
        torch.tensor([0, 0, 0, 1, 1, 2]),
    )
    assert result.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0]
    assert result.dtype == torch.float64


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 9)), max_size=15))
def test_kimi_length_reward_equals_a_plain_twin(rows: list[tuple[int, bool, int]]):
    expected = []
    for group, correct, length in rows:
        lengths = [n for g, _, n in rows if g == group]
        spread = max(lengths) - min(lengths)
        reward = 0.5 - (length - min(lengths)) / spread if spread else 0.0
        expected.append(reward if correct else min(0.0, reward))
    result = kimi_length_reward(
        torch.tensor([c for _, c, _ in rows], dtype=torch.bool),
        torch.tensor([n for *_, n in rows], dtype=torch.int64),
        torch.tensor([g for g, *_ in rows], dtype=torch.int64),
    )
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("wrong", ["type", "shape"])
def test_length_rewards_refuse_what_does_not_fit(wrong: str):
    correct = torch.tensor([1, 0]) if wrong == "type" else torch.tensor([True])
    match = "correct_N must be bool" if wrong == "type" else "lengths"
    with pytest.raises(InputError, match=match):
        cosine_length_reward(correct, torch.tensor([1, 2]), max_length=5)
    with pytest.raises(InputError, match=match):
        kimi_length_reward(correct, torch.tensor([1, 2]), torch.tensor([0, 0]))


def test_running_moments_by_hand():
    # 1, 3, then 5: mean 3, m2 8, std 2
    start = RunningMoments()
    assert (start.count, start.mean, start.m2, start.std) == (0, 0.0, 0.0, 0.0)
    later = start.update(torch.tensor([1.0, 3.0])).update(torch.tensor([5]))
    assert (later.count, later.mean, later.m2) == (3, pytest.approx(3.0), pytest.approx(8.0))
    assert later.std == pytest.approx(2.0, rel=1e-15)
    assert start == RunningMoments()
    rewards = torch.tensor([5.0, -1.0], requires_grad=True)
    assert later.normalise(rewards, minus_mean=False, epsilon=0.5).tolist() == pytest.approx([2.0, -0.4])
    assert later.normalise(rewards, minus_mean=True, epsilon=0.5).tolist() == pytest.approx([0.8, -1.6])
    assert later.normalise(rewards, minus_mean=True).dtype == torch.float64
    assert not later.normalise(rewards, minus_mean=True).requires_grad


@given(st.lists(REWARDS, max_size=4))
def test_running_moments_of_batches_in_any_order_are_those_of_everything(batches: list[list[float]]):
    flat = [reward for batch in batches for reward in batch]
    for order in (batches, batches[::-1], [flat]):
        moments = RunningMoments()
        for batch in order:
            moments = moments.update(torch.tensor(batch, dtype=torch.float64))
        assert moments.count == len(flat)
        assert moments.mean == pytest.approx(statistics.fmean(flat) if flat else 0.0, rel=1e-11, abs=1e-11)
        assert moments.std == pytest.approx(statistics.stdev(flat) if len(flat) > 1 else 0.0, rel=1e-9, abs=1e-9)


def test_running_moments_survive_json():
    moments = RunningMoments().update(torch.tensor([0.1, 0.7, 1 / 3]))
    restored = RunningMoments(**json.loads(json.dumps(asdict(moments))))
    assert restored == moments
    assert type(restored.count) is int
    batch = torch.tensor([0.3, 0.9])
    assert restored.update(batch) == moments.update(batch)


def test_running_moments_epsilon_defaults_to_a_hundred_millionth():
    moments = RunningMoments().update(torch.tensor([0.0, 1e-8], dtype=torch.float64))
    expected = 1e-8 / (1e-8 * math.sqrt(0.5) + 1e-8)
    result = moments.normalise(torch.tensor([1e-8], dtype=torch.float64), minus_mean=False)
    assert float(result[0]) == pytest.approx(expected, rel=1e-6)


def test_running_moments_without_a_spread_divide_nothing():
    rewards = torch.tensor([0.1, 2.0], dtype=torch.float64)
    assert RunningMoments().normalise(rewards, minus_mean=True).tolist() == [0.1, 2.0]
    equal = RunningMoments().update(torch.full((8,), 0.1, dtype=torch.float64))
    assert equal.m2 == 0.0
    assert equal.normalise(rewards, minus_mean=False).tolist() == [0.1, 2.0]
    assert equal.normalise(rewards, minus_mean=True).tolist() == [0.0, 1.9]


def test_running_moments_refuse_a_missing_reward():
    with pytest.raises(InputError, match="dropped before moments"):
        RunningMoments().update(torch.tensor([1.0, math.nan]))
