"""Completions of a policy become a batch with one advantage each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.sampled_groups import SampledGroups


def rollout(index: int) -> Rollout:
    logprobs = (-0.5 - index, -1.0)
    return Rollout("p", index, (5, 6), logprobs, (0.0, 0.0), "stop", 0, f"text {index}", None, RewardStatus.UNSCORED)


def group(position: int, size: int) -> RolloutGroup:
    return RolloutGroup(Prompt(f"p{position}", (1, 2), "?", None, "p"), 0, position, tuple(map(rollout, range(size))))


SAMPLED = SampledGroups((group(0, 2), group(1, 1)), temperature=0.7)


def test_completions_stand_in_the_order_of_their_prompts() -> None:
    assert SAMPLED.texts == [["text 0", "text 1"], ["text 0"]]
    assert SAMPLED.group_ids.tolist() == [0, 0, 1]
    assert [one.sample_index for one in SAMPLED.completions] == [0, 1, 0]
    assert (len(SAMPLED), [one.position for one in SAMPLED]) == (2, [0, 1])


@pytest.mark.parametrize(
    "advantages",
    [torch.tensor([1.0, -1.0, 0.5]), [1.0, -1.0, 0.5], [[1.0, -1.0], [0.5]], [torch.tensor([1.0, -1.0]), [0.5]]],
)
def test_a_batch_has_the_log_probs_that_were_drawn_with(advantages: list[float]) -> None:
    batch = SAMPLED.batch(advantages)
    assert [one.advantage for one in batch] == [1.0, -1.0, 0.5]
    assert [one.token_ids for one in batch] == [(1, 2, 5, 6)] * 3
    assert [one.old_logprobs for one in batch] == [(-0.5, -1.0), (-1.5, -1.0), (-0.5, -1.0)]
    assert [one.behaviour_logprobs for one in batch] == [one.old_logprobs for one in batch]
    assert batch.temperature == 0.7
    assert batch.counts.num_loss_tokens == 6


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda: SAMPLED.batch([1.0, 2.0]), "sampled.advantages"),
        (lambda: SAMPLED.batch([[1.0, 2.0]]), "sampled.advantages"),
        (lambda: SAMPLED.batch([1.0, math.nan, 2.0]), "sampled.advantage_not_finite"),
        (lambda: replace(SAMPLED, temperature=0.0).batch([1.0, 2.0, 3.0]), "sampled.greedy"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(wrong: Callable[[], object], code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        wrong()
    assert caught.value.problem.code == code
