"""Samples and groups in progress: requests, spans of versions, and the form in which a checkpoint keeps them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from thread_doubles import a_group, a_prompt, drawn, ended

from rft_trainer.async_rollouts.partial_rollout import PartialSample, oldest_version
from rft_trainer.async_rollouts.protocols import DrawRequest
from rft_trainer.records.rollouts import Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus


def test_a_sample_asks_for_what_is_left_after_its_tokens() -> None:
    sample = PartialSample(7, 5)
    assert (sample.needs_generation, sample.is_complete, sample.left) == (True, False, 5)
    assert sample.request(a_prompt(1)) == DrawRequest((11, 21), 7, 0, 5)
    sample.add(drawn(0, (3, 4), "interrupted"))
    assert (sample.needs_generation, sample.is_complete, sample.left) == (True, False, 3)
    assert sample.request(a_prompt(1)) == DrawRequest((11, 21, 3, 4), 7, 2, 3)
    sample.add(drawn(0, (5, 6, 7), "length"))
    assert (sample.needs_generation, sample.is_complete, sample.left) == (False, True, 0)
    assert (sample.awaits_environment, sample.worker_index) == (False, 0)


def test_more_tokens_than_its_budget_are_an_error() -> None:
    sample = PartialSample(7, 1)
    with pytest.raises(AssertionError):
        sample.add(drawn(0, (3, 4)))


def test_a_span_grows_while_its_version_goes_on() -> None:
    sample = PartialSample(7, 20)
    for ids, version in (((1, 2), 1), ((3,), 1), ((), 2), ((4, 5, 6), 3), ((7,), 1)):
        sample.add(drawn(0, ids, "interrupted", version))
    assert sample.spans == [(1, 3), (3, 3), (1, 1)]


def test_a_sample_becomes_a_rollout_when_it_has_ended() -> None:
    sample = PartialSample(7, 5)
    sample.add(drawn(0, (3, 4), "interrupted", 2))
    with pytest.raises(AssertionError):
        sample.rollout(a_prompt(1), 3, "text")
    one = replace(sample, token_ids=[3, 4], logprobs=[-0.5, -0.5], log_kept_mass=[0.0, 0.0], spans=[(2, 2)])
    one.add(drawn(0, (), "length", 3))
    expected = Rollout(
        "p:1", 3, (3, 4), (-0.5, -0.5), (0.0, 0.0), "length", 2, "text", None, RewardStatus.UNSCORED, version_spans=()
    )
    assert one.rollout(a_prompt(1), 3, "text") == expected
    sample.add(drawn(0, (5,), "stop", 3))
    assert sample.rollout(a_prompt(1), 3, "text").version_spans == ((2, 2), (3, 1))
    assert sample.rollout(a_prompt(1), 3, "text").weight_version == 2


def test_samples_and_groups_come_back_from_json_as_they_were() -> None:
    begun = PartialSample(7, 5)
    begun.add(drawn(0, (3, 4), "interrupted", 2))
    group = a_group(6, begun, ended(8), epoch=2)
    state = json.loads(json.dumps(group.state()))
    assert state["entry"] == [2, 6, 6]
    assert state["group"] is None
    again = a_group(6)
    again.take(state, lambda states: [PartialSample.of(one) for one in states])
    assert again.drafts == group.drafts
    assert again.group is None
    assert all(isinstance(span, tuple) for draft in again.drafts for span in draft.state()["spans"])


def test_a_scored_group_is_kept_without_drafts_and_without_its_images() -> None:
    group = a_group(6, ended(8), epoch=2, media=object())
    rollout = ended(8, 5, 6).rollout(group.prompt, 0, "text")
    group.group = RolloutGroup(group.prompt, 2, 6, (replace(rollout, reward=1.0, status=RewardStatus.OK),), 0.5)
    state = json.loads(json.dumps(group.state()))
    assert state["drafts"] == []
    again = a_group(6, PartialSample(1, 2), epoch=2, media=group.prompt.media)
    again.take(state, lambda states: [])
    assert again.group == group.group
    assert again.drafts == []


def test_a_group_is_whole_when_every_sample_has_ended() -> None:
    assert not a_group(1, ended(1), PartialSample(2, 3)).is_complete
    assert a_group(1, ended(1), ended(2)).is_complete
    assert a_group(1).is_complete


def test_the_oldest_version_of_a_stored_group_is_that_of_any_token() -> None:
    drafts = [ended(1, version=5), ended(2, version=3), PartialSample(3, 4)]
    assert oldest_version(a_group(1, *drafts).state(), 9) == 3
    assert oldest_version(a_group(1, PartialSample(3, 4)).state(), 9) == 9
    group = a_group(1)
    rollouts = tuple(ended(1, version=version).rollout(group.prompt, 0, "") for version in (6, 4))
    group.group = RolloutGroup(group.prompt, 0, 1, rollouts)
    assert oldest_version(group.state(), 9) == 4
