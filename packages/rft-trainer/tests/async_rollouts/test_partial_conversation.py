"""Stages of a conversation in progress, and the JSON of which it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from rft_core.keyed_random import derive_key
from rft_trainer.async_rollouts.partial_conversation import ConversationDraft, ConversationStage, Recorded
from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.environments.protocol import AssistantTurn, ToolCall
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.rollouts.conversation import Conversation

PROMPT = Prompt("p", (1, 2), "p", "7", "p")
KEY = 11


@dataclass(frozen=True)
class Drawn:
    """New tokens of an engine."""

    token_ids: tuple[int, ...]
    finish_reason: str = "interrupted"
    weight_version: int = 4
    request: int = 0

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(-0.5 * token for token in self.token_ids)

    @property
    def log_kept_mass(self) -> tuple[float, ...]:
        return tuple(-0.25 * token for token in self.token_ids)


def fresh(number: int = 0) -> ConversationDraft:
    return ConversationDraft(Conversation.start(PROMPT, 3, KEY, number), 1)


def talking() -> ConversationDraft:
    """One turn was sampled and answered, of the second there are two tokens."""
    draft = fresh(5)
    conversation = draft.conversation.copy()
    conversation.observe([7], "opening")
    turn = PartialSample(KEY, 9)
    turn.add(Drawn((3, 4), "stop", weight_version=2))
    conversation.add_turn(turn, turn.spans, Turn(True, 2, "3 4", 0.5, num_calls=1, seconds=1.5))
    conversation.observe([8, 9], "answer")
    conversation.episode.turns.append(AssistantTurn("3 4", (ToolCall("add", {"a": 1}),), "stop"))
    conversation.episode.seconds = 1.5
    conversation.parts = {"correctness": 0.5}
    draft.recorded += [Recorded([{"role": "user", "content": "opening"}]), Recorded([{"role": "tool"}], 0.5)]
    draft.begin_turn(conversation, 6)
    draft.add(Drawn((5,)))
    draft.add(Drawn((6,), weight_version=5))
    return draft


def restored(draft: ConversationDraft) -> ConversationDraft:
    again = fresh()
    again.take(json.loads(json.dumps(draft.state())))
    return again


def waits_for(draft: ConversationDraft) -> tuple[bool, bool, bool]:
    return draft.needs_generation, draft.awaits_environment, draft.is_complete


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (ConversationStage.OPENING, (False, True, False)),
        (ConversationStage.RESTORED, (False, True, False)),
        (ConversationStage.DRAWING, (True, False, False)),
        (ConversationStage.ASKING, (False, True, False)),
        (ConversationStage.COMPLETE, (False, False, True)),
    ],
)
def test_a_stage_says_who_is_waited_for(stage: ConversationStage, expected: tuple[bool, bool, bool]) -> None:
    draft = fresh()
    assert draft.stage is ConversationStage.OPENING
    draft.stage = stage
    assert waits_for(draft) == expected


def test_a_turn_is_drawn_after_all_tokens_so_far_until_it_ends() -> None:
    draft = talking()
    assert draft.stage is ConversationStage.DRAWING
    request = draft.request(PROMPT)
    assert request.prefix == (1, 2, 7, 3, 4, 8, 9, 5, 6)
    assert (request.key, request.start, request.budget) == (derive_key(KEY, "turn", 1), 2, 4)
    draft.add(Drawn((2,), "stop", weight_version=5))
    assert draft.stage is ConversationStage.ASKING
    assert draft.sampled_turn.token_ids == [5, 6, 2]
    assert draft.sampled_turn.spans == [(4, 1), (5, 2)]


def test_a_conversation_that_is_over_has_no_next_turn() -> None:
    draft = talking()
    conversation = draft.conversation.copy()
    conversation.ended = "turns"
    draft.begin_turn(conversation, 6)
    assert draft.conversation is conversation
    assert draft.is_complete
    with pytest.raises(AssertionError, match="no turn"):
        _ = draft.sampled_turn


def test_a_state_is_plain_and_says_which_weights_drew_it() -> None:
    state = talking().state()
    assert json.loads(json.dumps(state))["conversation"] == {
        "token_ids": [7, 3, 4, 8, 9],
        "logprobs": [0.0, -1.5, -2.0, 0.0, 0.0],
        "log_kept_mass": [0.0, -0.75, -1.0, 0.0, 0.0],
        "spans": [[2, 2]],
        "turns": [
            {"sampled": False, "num_tokens": 1, "text": "opening", "reward": 0.0, "num_calls": 0, "num_malformed": 0,
             "seconds": 0.0},
            {"sampled": True, "num_tokens": 2, "text": "3 4", "reward": 0.5, "num_calls": 1, "num_malformed": 0,
             "seconds": 1.5},
            {"sampled": False, "num_tokens": 2, "text": "answer", "reward": 0.0, "num_calls": 0, "num_malformed": 0,
             "seconds": 0.0},
        ],
        "num_spoken": 1,
        "ended": "",
        "status": "ok",
        "detail": "",
        "parts": {"correctness": 0.5},
    }  # fmt: skip
    assert state["spans"] == [(2, 2), (4, 1), (5, 1)]
    assert state["seconds"] == 1.5
    assert fresh().state()["turn"] is None
    assert fresh().state()["spans"] == []


def test_everything_comes_back_and_the_environment_is_asked_first() -> None:
    before = talking()
    draft = restored(before)
    assert json.dumps(draft.state()) == json.dumps(before.state())
    assert draft.stage is ConversationStage.RESTORED
    assert draft.conversation.episode.turns == [AssistantTurn("3 4", (ToolCall("add", {"a": 1}),), "stop")]
    assert draft.conversation.episode.seconds == 1.5
    assert draft.conversation.episode.number == 0, "the episode is one of the new process"
    assert draft.recorded == before.recorded
    assert draft.conversation.turn_key == before.conversation.turn_key
    draft.go_on()
    assert draft.stage is ConversationStage.DRAWING
    assert draft.request(PROMPT) == before.request(PROMPT)


def test_a_turn_that_had_ended_is_answered_after_the_replay() -> None:
    before = talking()
    before.add(Drawn((2,), "stop"))
    draft = restored(before)
    draft.go_on()
    assert draft.stage is ConversationStage.ASKING
    assert draft.sampled_turn.is_complete


def test_a_conversation_that_is_over_stays_over() -> None:
    before = talking()
    conversation = before.conversation.copy()
    conversation.ended, conversation.status, conversation.detail = "environment", RewardStatus.TIMEOUT, "late"
    before.begin_turn(conversation, 6)
    draft = restored(before)
    assert draft.is_complete
    rollout = draft.conversation.rollout()
    assert (rollout.reward, rollout.status, rollout.detail) == (None, RewardStatus.TIMEOUT, "late")
    assert rollout.finish_reason == "environment"
    assert rollout.completion_ids == (7, 3, 4, 8, 9)


def test_of_a_conversation_without_an_opening_nothing_is_kept() -> None:
    draft = restored(fresh(8))
    assert draft.stage is ConversationStage.OPENING
    assert draft.conversation == Conversation.start(PROMPT, 3, KEY, 0)


def test_a_restart_keeps_the_sample_and_its_key_and_nothing_of_what_was_said() -> None:
    draft = restored(talking())
    draft.restart(12)
    assert draft.conversation == Conversation.start(PROMPT, 3, KEY, 12)
    empty: Any = (ConversationStage.OPENING, None, [])
    assert (draft.stage, draft.turn, draft.recorded) == empty
    assert draft.worker_index == 1
