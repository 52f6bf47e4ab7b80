"""Figures and rows of conversations, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.records.rollouts import Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.runs.conversation_metrics import conversation_metrics, conversation_rows

OK = RewardStatus.OK


def rollout(*turns: Turn, finish: str = "stop", status: RewardStatus = OK, num: int = 0, **more: Any) -> Rollout:
    length = sum(turn.num_tokens for turn in turns) or num
    reward = 1.0 if status is OK else None
    zeros = (0.0,) * length
    return Rollout("p", 0, (1,) * length, zeros, zeros, finish, 0, "x", reward, status, turns=turns, **more)


FIRST = rollout(
    Turn(False, 3, "asked"),
    Turn(True, 5, "calls", num_calls=2, num_malformed=1),
    Turn(False, 2, "42"),
    Turn(True, 4, "42", reward=1.0),
)
SECOND = rollout(Turn(False, 3, "asked"), Turn(True, 4, "41"), finish="turns", status=RewardStatus.FAILED)
THIRD = rollout(Turn(False, 1, "asked"), status=RewardStatus.TIMEOUT)
FOURTH = rollout(Turn(False, 3, "asked"), Turn(True, 1, "3", num_calls=1), status=RewardStatus.CRASHED)


def test_figures_are_over_conversations_and_over_sampled_turns() -> None:
    assert conversation_metrics([FIRST, SECOND, THIRD, FOURTH, rollout(num=3)]) == {
        "turn/count_mean": 1.0,
        "turn/count_max": 2,
        "turn/limit_share": 0.25,
        "turn/observation_tokens_mean": (5 + 3 + 1 + 3) / 4,
        "turn/call_share": 2 / 4,
        "tool/calls_mean": 3 / 4,
        "tool/well_formed_share": 3 / 4,
        "environment/ok_share": 0.25,
        "environment/failed_share": 0.25,
        "environment/timeout_share": 0.25,
        "environment/crashed_share": 0.25,
    }


def test_without_conversations_turns_or_calls_there_is_nothing_to_say() -> None:
    assert conversation_metrics([rollout(num=3)]) == conversation_metrics([]) == {}
    found = conversation_metrics([SECOND])
    assert "tool/well_formed_share" not in found
    assert found["tool/calls_mean"] == 0.0
    assert conversation_metrics([THIRD])["turn/call_share"] == 0.0
    garbled = rollout(Turn(True, 1, "3", num_malformed=2))
    assert conversation_metrics([garbled])["tool/well_formed_share"] == 0.0


def test_a_row_has_its_turns() -> None:
    assert conversation_rows(FIRST) == {
        "turns": [
            {"who": "environment", "text": "asked", "num_tokens": 3},
            {"who": "policy", "text": "calls", "num_tokens": 5, "reward": 0.0, "calls": 2, "malformed": 1},
            {"who": "environment", "text": "42", "num_tokens": 2},
            {"who": "policy", "text": "42", "num_tokens": 4, "reward": 1.0, "calls": 0, "malformed": 0},
        ]
    }
    assert conversation_rows(rollout(num=2)) == {}


@pytest.mark.parametrize("status", [RewardStatus.UNPARSABLE, RewardStatus.NO_VERDICT])
def test_another_status_is_no_share_of_an_environment(status: RewardStatus) -> None:
    found = conversation_metrics([rollout(Turn(True, 1, "3"), status=status)])
    assert [found[f"environment/{name}_share"] for name in ("ok", "failed", "timeout", "crashed")] == [0.0] * 4
