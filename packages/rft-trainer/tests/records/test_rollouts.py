"""Records of a step: lengths that must agree, the tokens in the loss, versions and signals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rft_trainer.records.rollouts import Rollout, TokenBatch, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn

ROLLOUT = Rollout("p", 0, (5, 6, 7), (-0.5,) * 3, (0.0,) * 3, "stop", 4, "x", 1.0, RewardStatus.OK)
SAMPLE = TrainingSample("s", (1, 2, 3, 4, 5), 2, 0.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"completion_ids": (5, 6)},
        {"behaviour_logprobs": ()},
        {"log_kept_mass": (0.0,) * 4},
        {"turns": (Turn(True, 2, "x"),)},
        {"turns": (Turn(False, 2, "x"), Turn(True, 2, "x"))},
    ],
)
def test_lists_and_turns_of_a_rollout_have_an_entry_a_token(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="p#0"):
        replace(ROLLOUT, **changed)


def test_a_rollout_without_turns_was_sampled_whole() -> None:
    assert (ROLLOUT.num_sampled, ROLLOUT.loss_mask, ROLLOUT.newest_version) == (3, (), 4)
    talk = replace(ROLLOUT, turns=(Turn(False, 1, "x"), Turn(True, 2, "y")), version_spans=((4, 1), (6, 1)))
    assert (talk.num_sampled, talk.loss_mask, talk.newest_version) == (2, (False, True, True), 6)
    assert replace(ROLLOUT, turns=(Turn(False, 3, "x"),)).num_sampled == 0


@pytest.mark.parametrize("prompt_length", [-1, 6])
def test_a_prompt_is_a_part_of_its_sequence(prompt_length: int) -> None:
    with pytest.raises(ValueError, match="prompt_length"):
        replace(SAMPLE, prompt_length=prompt_length)
    assert replace(SAMPLE, prompt_length=0).num_tokens == replace(SAMPLE, prompt_length=5).num_tokens == 5


FIELDS = [
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "token_advantages",
    "old_values",
    "returns",
    "token_weights",
    "selected",
    "loss_mask",
]


@pytest.mark.parametrize("name", FIELDS)
def test_lists_of_a_sample_have_an_entry_a_response_token_or_none(name: str) -> None:
    for values in ((1.0,) * 3, ()):
        changed: dict[str, Any] = {name: values}
        assert getattr(replace(SAMPLE, **changed), name) == values
    for length in (1, 2, 4, 5):
        changed = {name: (1.0,) * length}
        with pytest.raises(ValueError, match=name):
            replace(SAMPLE, **changed)


@pytest.mark.parametrize(
    ("prompt_length", "mask", "expected"),
    [
        (2, (), 3),
        (1, (), 4),
        (0, (), 4),
        (5, (), 0),
        (2, (True, False, True), 2),
        (1, (True, False, True, False), 2),
        (0, (True, True, False, False, True), 2),
    ],
)
def test_tokens_in_the_loss_are_those_of_the_response_but_the_first_of_a_sequence(
    prompt_length: int, mask: tuple[bool, ...], expected: int
) -> None:
    assert replace(SAMPLE, prompt_length=prompt_length, loss_mask=mask).num_loss_tokens == expected


def test_a_sample_has_an_advantage_where_any_token_has_one() -> None:
    assert not SAMPLE.has_advantage
    assert replace(SAMPLE, advantage=-0.5).has_advantage
    assert replace(SAMPLE, token_advantages=(0.0, 0.0, 0.25)).has_advantage
    assert not replace(SAMPLE, advantage=1.0, token_advantages=(0.0, 0.0, 0.0)).has_advantage
    assert replace(SAMPLE, advantage=-0.5).mean_advantage == -0.5
    tokens = replace(SAMPLE, token_advantages=(1.0, 2.0, 6.0))
    assert tokens.mean_advantage == 3.0
    assert replace(tokens, loss_mask=(True, False, True)).mean_advantage == 3.5
    assert replace(tokens, loss_mask=(False, False, False)).mean_advantage == 0.0


def test_the_input_of_a_forward_is_tokens_places_segments_mask_and_images() -> None:
    ids, places, segments, mask, rest = (torch.full((2,), value) for value in range(5))
    batch = TokenBatch(ids, places, segments, mask, rest, None, None, None, mm_inputs=("image", None))
    tokens = batch.tokens
    assert [tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T] == [ids, places, segments]
    assert (tokens.mm_inputs, batch.old_values_T, batch.returns_T) == (("image", None), None, None)
