"""From scored groups to samples: what is left out and counted, one flat order, and the samples of each update."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rft_trainer.batches.units import optimizer_batches
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.scoring.samples import (
    FilterResult,
    build_samples,
    drop_zero_variance_groups,
    flat_rewards,
    flat_rollouts,
    has_signal,
    keep_scored,
    shuffle_rewards,
)


def rollout(number: int, reward: float | None, *tokens: int, **more: Any) -> Rollout:
    status = RewardStatus.UNSCORED if reward is None else RewardStatus.OK
    ids = tokens or (3, 4)
    made = Rollout(
        "p", number, ids, (-0.5 - number,) * len(ids), (0.0,) * len(ids), "stop", 0, f"x{number}", reward, status
    )
    return replace(made, **more)


def group(
    *rewards: float | None, epoch: int = 0, position: int = 0, baseline: float | None = None, media: Any = None
) -> RolloutGroup:
    rollouts = tuple(rollout(number, reward) for number, reward in enumerate(rewards))
    return RolloutGroup(Prompt("p", (1, 2), "p", None, "p", media), epoch, position, rollouts, baseline_reward=baseline)


def rewards(groups: tuple[RolloutGroup, ...] | list[RolloutGroup]) -> list[list[float | None]]:
    return [[one.reward for one in each.rollouts] for each in groups]


def test_what_has_no_score_is_left_out_and_then_groups_with_too_few() -> None:
    kept = keep_scored([group(1.0, None, 0.0), group(None, 2.0), group(None, None), group(3.0, 4.0)])
    assert rewards(kept.groups) == [[1.0, 0.0], [3.0, 4.0]]
    assert kept.reasons == {"unscored": 4, "alone_in_group": 1}
    assert [one.sample_index for one in kept.groups[0].rollouts] == [0, 2]


def test_reasons_that_nothing_was_left_out_for_are_not_named() -> None:
    assert keep_scored([group(1.0, 2.0)]) == FilterResult((group(1.0, 2.0),), {})


def test_one_response_is_enough_where_nothing_is_compared() -> None:
    kept = keep_scored([group(1.0), group(None)], smallest_group=1)
    assert rewards(kept.groups) == [[1.0]]
    assert kept.reasons == {"unscored": 1}


def test_groups_without_the_baseline_they_need_are_left_out() -> None:
    groups = [group(1.0, 2.0), group(3.0, 4.0, None, baseline=0.0)]
    kept = keep_scored(groups, needs_baseline=True)
    assert rewards(kept.groups) == [[3.0, 4.0]]
    assert kept.groups[0].baseline_reward == 0.0
    assert kept.reasons == {"no_baseline": 2, "unscored": 1}
    assert len(keep_scored(groups).groups) == 2


def test_groups_of_equal_rewards_are_left_out_and_counted_beside_other_reasons() -> None:
    kept = FilterResult((group(1.0, 1.0, 1.0), group(0.0, 1.0), group(2.0, 2.0)), {"unscored": 2})
    dropped = drop_zero_variance_groups(kept)
    assert rewards(dropped.groups) == [[0.0, 1.0]]
    assert dropped.reasons == {"unscored": 2, "no_signal": 5}
    assert drop_zero_variance_groups(dropped) == dropped
    assert drop_zero_variance_groups(FilterResult((group(0.0, 1.0),), {})).reasons == {}


def test_a_group_has_a_signal_where_scored_rewards_differ() -> None:
    signals = [has_signal(each) for each in (group(0.0, 1.0), group(1.0, 1.0), group(1.0, None), group(1.0, None, 0.5))]
    assert signals == [True, False, False, True]


def test_shuffled_rewards_stay_in_their_group_with_their_status_and_are_drawn_by_seed_and_place() -> None:
    groups = [group(*map(float, range(7)), None, position=place, epoch=epoch) for epoch in (0, 1) for place in (0, 1)]
    shuffled = shuffle_rewards(groups, 3)
    orders = [tuple(one) for one in rewards(shuffled)]
    assert len(set(orders)) == 4, "each place of each epoch is shuffled by itself"
    for each, before in zip(shuffled, groups, strict=True):
        assert Counter(one.reward for one in each.rollouts) == Counter(one.reward for one in before.rollouts)
        assert [one.status is RewardStatus.UNSCORED for one in each.rollouts] == [
            one.reward is None for one in each.rollouts
        ]
        assert [one.response_text for one in each.rollouts] == [one.response_text for one in before.rollouts]
        assert (each.epoch, each.position) == (before.epoch, before.position)
    assert shuffle_rewards(groups, 3) == shuffled
    assert rewards(shuffle_rewards(groups[2:], 3)) == rewards(shuffled[2:]), "whatever else is in the rollout"
    assert rewards(shuffle_rewards(groups, 4)) != rewards(shuffled)


def test_flat_lists_are_in_the_order_of_groups_and_of_samples() -> None:
    groups = [group(1.0, 2.0, position=4), group(3.0, position=5)]
    assert [(each.position, one.reward) for each, one in flat_rollouts(groups)] == [(4, 1.0), (4, 2.0), (5, 3.0)]
    rewards_N, group_ids_N = flat_rewards(groups)
    assert (rewards_N.tolist(), group_ids_N.tolist()) == ([1.0, 2.0, 3.0], [0, 0, 1])
    assert flat_rewards([group(0.1)])[0].item() == 0.1, "as exact as the reward itself"
    assert [part.tolist() for part in flat_rewards([])] == [[], []]


def test_a_reward_that_is_missing_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="unscored"):
        flat_rewards([group(1.0, None)])


def test_a_sample_is_a_prompt_with_its_response_and_what_is_known_of_it() -> None:
    groups = [group(1.0, 2.0, epoch=2, position=4, media="image"), group(3.0, position=5)]
    old = [(-1.0, -2.0), (-3.0, -4.0), (-5.0, -6.0)]
    reference = [(-1.5, -2.5), (-3.5, -4.5), (-5.5, -6.5)]
    samples = build_samples(groups, [0.25, 0.5, 0.75], old, reference, returns=[(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)])
    assert [one.sample_id for one in samples] == ["2/4/p#0", "2/4/p#1", "0/5/p#0"]
    assert samples[1] == TrainingSample(
        "2/4/p#1",
        (1, 2, 3, 4),
        2,
        0.5,
        behaviour_logprobs=(-1.5, -1.5),
        old_logprobs=(-3.0, -4.0),
        reference_logprobs=(-3.5, -4.5),
        returns=(3.0, 4.0),
        media="image",
    )
    assert samples[2].media is None
    plain = build_samples(groups, [0.0] * 3, old, [], returns=[])
    assert [(one.reference_logprobs, one.returns, one.loss_mask) for one in plain] == [((), (), ())] * 3


def test_observations_are_masked_in_their_own_sample_alone() -> None:
    turns = (Turn(True, 1, "a"), Turn(False, 2, "o"))
    made = replace(group(1.0, 2.0), rollouts=(rollout(0, 1.0), rollout(1, 2.0, 5, 6, 7, turns=turns)))
    samples = build_samples([made], [0.0, 0.0], [(-1.0,) * 2, (-1.0,) * 3], [])
    assert [one.loss_mask for one in samples] == [(), (True, False, False)]


def sample(name: str, advantage: float, token_advantages: tuple[float, ...] = ()) -> TrainingSample:
    return TrainingSample(name, (1, 2, 3), 1, advantage, token_advantages=token_advantages)


def test_updates_take_samples_in_order_and_the_last_may_be_smaller() -> None:
    samples = [sample(name, 1.0) for name in "abcde"]
    assert [[one.sample_id for one in batch] for batch in optimizer_batches(samples, 2)] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    assert optimizer_batches([], 2) == []
