"""Signs in a step by hand: prompts that repeat, rewards that contradict one another, advantages, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.runs.rollout_signs import batch_signs, credit_signs
from rft_trainer.scoring.samples import flat_rollouts, sample_name


def rollout(index: int, reward: float | None, ids: Sequence[int] = (5, 6), **more: Any) -> Rollout:
    zeros = (0.0,) * len(ids)
    status = RewardStatus.OK if reward is not None else RewardStatus.FAILED
    finish = more.pop("finish_reason", "stop")
    return Rollout("p", index, tuple(ids), zeros, zeros, finish, 3, "text", reward, status, **more)


def group(number: int, *rollouts: Rollout, ids: Sequence[int] | None = None) -> RolloutGroup:
    prompt = Prompt(f"p{number}", tuple(ids or (1, number)), f"text {number}", "7", "s")
    return RolloutGroup(prompt, 0, number, rollouts)


def samples(groups: Sequence[RolloutGroup], advantages: Sequence[float], **more: Any) -> list[TrainingSample]:
    return [
        TrainingSample(sample_name(of, one), (1, 2, *one.completion_ids), 2, advantage, **more)
        for (of, one), advantage in zip(flat_rollouts(groups), advantages, strict=True)
    ]


def test_a_batch_is_known_by_its_prompts_in_any_order() -> None:
    one, two, again = group(0, rollout(0, 1.0)), group(1, rollout(0, 0.0)), group(2, rollout(0, 1.0), ids=(1, 0))
    first = batch_signs([one, two])
    assert first["data/distinct_prompts"] == 2
    assert batch_signs([two, one])["data/checksum"] == first["data/checksum"]
    assert batch_signs([one, again])["data/distinct_prompts"] == 1
    assert batch_signs([one, again])["data/checksum"] != first["data/checksum"]
    assert "reward/inconsistent" not in first


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0, 0.0], 0.0),
        ([1.0, 0.0, 0.0], 1.0),
        ([1.0, 1.0 + 1e-6, 0.0], 0.0),
        ([1.0, None, 0.0], None),
    ],
)
def test_equal_responses_have_equal_rewards(rewards: list[float | None], expected: float | None) -> None:
    ids = [(5, 6), (5, 6), (7,)]
    of = group(0, *(rollout(n, reward, ids[n]) for n, reward in enumerate(rewards)))
    # the same response to another prompt may have another reward
    other = group(1, rollout(0, 0.5, ids[0]))
    assert batch_signs([of, other]).get("reward/inconsistent") == expected


def test_the_same_words_of_a_conversation_may_have_another_reward() -> None:
    turns = (Turn(True, 2, "text"),)
    assert "reward/inconsistent" not in batch_signs(
        [group(0, rollout(0, 1.0, turns=turns), rollout(1, 0.0, turns=turns))]
    )


def test_advantages_agree_with_rewards_within_groups() -> None:
    groups = [group(0, rollout(0, 1.0), rollout(1, 0.0)), group(1, rollout(0, 5.0), rollout(1, 4.0))]
    right = credit_signs(groups, samples(groups, [1.0, -1.0, 1.0, -1.0]))
    assert right == {"policy/advantage_agreement": pytest.approx(1.0), "data/trained_share": 1.0}
    flipped = credit_signs(groups, samples(groups, [-1.0, 1.0, -1.0, 1.0]))
    assert flipped["policy/advantage_agreement"] == pytest.approx(-1.0)
    # a level that differs between groups is no sign
    assert credit_signs(groups, samples(groups, [9.0, 8.0, 2.0, 1.0]))["policy/advantage_agreement"] == pytest.approx(1)
    assert "policy/advantage_agreement" not in credit_signs(groups, samples(groups, [1.0, 1.0, 1.0, 1.0]))
    assert credit_signs(groups, []) == {}


def test_the_trained_share_counts_responses_that_ended_by_themselves() -> None:
    groups = [group(0, rollout(0, 1.0), rollout(1, 0.0), rollout(2, 0.0, finish_reason="length"))]
    found = samples(groups, [1.0, 0.0, -1.0])
    found[0] = replace(found[0], loss_mask=(True, False))
    found[2] = replace(found[2], loss_mask=(False, False))
    assert credit_signs(groups, found)["data/trained_share"] == 0.75
