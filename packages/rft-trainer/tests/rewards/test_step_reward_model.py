from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.reward_model import StepModelReward


class Scorer:
    def __init__(self, *found: Any) -> None:
        self.found = list(found)

    def score_responses(self, prompts: Any, messages: Any, responses: Any) -> list[Any]:
        return self.found


def item() -> RewardItem:
    return RewardItem(
        prompt_id="p", prompt_text="1?", response_text="a\nb", label=None, finish_reason="stop", num_tokens=3
    )


def test_the_reward_is_reduced_and_steps_keep_theirs() -> None:
    [score] = StepModelReward("prm", Scorer([(2, 0.0), (3, 100.0)]), "product", 2.0)([item()])
    assert score.value == pytest.approx(1.0)
    assert score.breakdown == {"prm": pytest.approx(0.5)}
    assert score.steps == ((2, pytest.approx(1.0)), (3, pytest.approx(2.0)))


def test_what_cannot_be_scored_is_a_status() -> None:
    [no_step, not_finite] = StepModelReward("prm", Scorer("no step", [(1, float("nan"))]), "min")([item(), item()])
    assert (no_step.value, no_step.status, no_step.detail) == (None, RewardStatus.FAILED, "no step")
    assert not_finite.status is RewardStatus.FAILED
