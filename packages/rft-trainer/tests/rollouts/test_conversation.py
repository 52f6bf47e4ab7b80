"""One conversation, turn after turn: its tokens, whose weights sampled them, its limits, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_trainer.environments.episodes import Episode, Reply
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, ToolCall
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.rollouts.conversation import (
    Conversation,
    ConversationLimits,
    ConversationStepper,
    malformed_call_reply,
)
from rft_trainer.testing.bigram import FakeCompletion

PROMPT = Prompt("p:0", (1, 2), "2+2=", "4", "p")
HELLO = Reply(RewardStatus.OK, Answer([{"role": "user", "content": "hello"}, {"role": "user", "content": "go"}]))
MORE = Reply(RewardStatus.OK, Answer([{"role": "user", "content": "more"}], reward=0.25), seconds=0.5)
DONE = Reply(RewardStatus.OK, Answer(reward=1.0, done=True, parts={"correctness": 1.0}), seconds=0.25)
LATE = Reply(RewardStatus.TIMEOUT, seconds=2.0, detail="no answer within 2 s")


class TokenText:
    """An opening is 70 for each message, then 7; an observation 80 for each, then 8."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*(70 for _ in messages), 7)

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*(80 for _ in messages), 8)


def stepper(**limits: Any) -> ConversationStepper:
    return ConversationStepper(TokenText(), ToolCallFormat(), ConversationLimits(**{"max_turns": 3, **limits}))


def conversation(index: int = 4) -> Conversation:
    return Conversation.start(PROMPT, index, 11, 6)


def sampled(*token_ids: int, reason: str = "stop") -> FakeCompletion:
    return FakeCompletion(token_ids, (-0.5,) * len(token_ids), (-0.25,) * len(token_ids), reason, 3)


def play(held: Conversation, turn: FakeCompletion, reply: Reply, most: int = 20, text: str = "said", **limits: Any):
    """Take a turn that is answered with `reply`."""
    return stepper(**limits).answer_turns([held], [turn], [[(3, len(turn.token_ids))]], [text], lambda _: [reply], most)


def test_an_episode_has_the_prompt_and_a_key_of_its_own() -> None:
    assert conversation().episode == Episode(6, EnvironmentPrompt("p:0", "2+2=", "4"), derive_key(11, "environment"))


def test_the_tokens_of_the_environment_have_no_probability_and_those_of_the_policy_their_own() -> None:
    held = conversation()
    stepper().open(held, HELLO, 20)
    assert held.context == (1, 2, 70, 70, 7)
    play(held, sampled(4, 9), MORE)
    play(held, sampled(5, 9), DONE, text="four")
    rollout = held.rollout()
    assert rollout.completion_ids == (70, 70, 7, 4, 9, 80, 8, 5, 9)
    assert rollout.behaviour_logprobs == (0.0, 0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    assert rollout.log_kept_mass == (0.0, 0.0, 0.0, -0.25, -0.25, 0.0, 0.0, -0.25, -0.25)
    assert rollout.turns == (
        Turn(False, 3, "hello\ngo"),
        Turn(True, 2, "said", 0.25, seconds=0.5),
        Turn(False, 2, "more"),
        Turn(True, 2, "four", 1.0, seconds=0.25),
    )
    assert (rollout.prompt_id, rollout.sample_index, rollout.response_text) == ("p:0", 4, "four")
    assert (rollout.reward, rollout.status, rollout.finish_reason) == (1.25, RewardStatus.OK, "stop")
    assert (rollout.breakdown, rollout.steps) == ({"correctness": 1.0}, ((4, 0.25), (8, 1.0)))
    assert held.episode.seconds == 0.75


def test_a_conversation_without_a_sampled_turn_is_a_rollout_with_nothing_said() -> None:
    held = conversation()
    stepper().open(held, LATE, 20)
    rollout = held.rollout()
    assert (rollout.response_text, rollout.weight_version, rollout.version_spans) == ("", 0, ())
    assert (rollout.status, rollout.reward, rollout.detail) == (RewardStatus.TIMEOUT, None, "no answer within 2 s")
    assert (rollout.completion_ids, rollout.finish_reason) == ((7,), "environment")


def test_each_turn_after_the_first_has_a_key_of_its_own() -> None:
    held = conversation()
    keys = [held.turn_key]
    for number in (1, 2):
        play(held, sampled(4, 9), MORE)
        keys.append(held.turn_key)
        assert keys[number] == derive_key(11, "turn", number)
    assert keys[0] == 11
    assert len(set(keys)) == 3


def test_versions_that_sampled_are_told_with_how_many_tokens_of_each() -> None:
    held = conversation()
    held.add_turn(sampled(4, 5, 9), [(3, 2), (4, 1)], Turn(True, 3, ""))
    held.add_turn(sampled(4, 9), [(4, 2)], Turn(True, 2, ""))
    assert held.spans == [(3, 2), (4, 3)]
    rollout = held.rollout()
    assert (rollout.weight_version, rollout.version_spans) == (3, ((3, 2), (4, 3)))
    one = conversation()
    one.add_turn(sampled(4, 9), [(5, 2)], Turn(True, 2, ""))
    one.add_turn(sampled(4, 9), [(5, 2)], Turn(True, 2, ""))
    assert (one.rollout().weight_version, one.rollout().version_spans) == (5, ())


def test_a_copy_goes_on_without_changing_what_it_was_taken_from() -> None:
    held = conversation()
    stepper().open(held, HELLO, 20)
    copy = held.copy()
    assert copy == held
    play(copy, sampled(4, 9), MORE)
    assert held.token_ids == [70, 70, 7]
    assert len(held.logprobs) == len(held.log_kept_mass) == 3
    assert (len(held.turns), held.spans, held.episode.turns, held.episode.seconds) == (1, [], [], 0.0)


def test_a_turn_has_what_is_left_and_no_more_than_its_own_limit() -> None:
    held = conversation()
    stepper().open(held, HELLO, 20)
    assert stepper().budget(held, 20) == 17
    assert [stepper(turn_max_len=most).budget(held, 20) for most in (5, 17, 18)] == [5, 17, 17]


def test_an_opening_leaves_a_token_to_the_policy_or_is_refused() -> None:
    held = conversation()
    with pytest.raises(OptionsError) as caught:
        stepper().open(held, HELLO, 3)
    assert caught.value.problem.code == "environment.no_room"
    assert caught.value.problem.do == "--generate_max_len 12"
    assert held.turns == []
    stepper().open(held, HELLO, 4)
    assert stepper().budget(held, 4) == 1
    assert held.ended == ""


def test_an_observation_is_appended_whole_where_a_token_is_left_behind_it() -> None:
    for most, ended, length in ((5, "", 4), (4, "length", 2)):
        held = conversation()
        play(held, sampled(4, 9), MORE, most)
        assert (held.ended, len(held.token_ids), held.rollout().reward) == (ended, length, 0.25)


@pytest.mark.parametrize(
    ("reason", "reply", "max_turns", "ended"),
    [
        ("stop", MORE, 2, ""),
        ("stop", MORE, 1, "turns"),
        ("length", MORE, 2, "length"),
        ("length", MORE, 1, "length"),
        ("stop", DONE, 1, "stop"),
        ("length", DONE, 2, "length"),
        ("length", LATE, 1, "environment"),
    ],
)
def test_how_a_conversation_ends_is_told(reason: str, reply: Reply, max_turns: int, ended: str) -> None:
    held = conversation()
    play(held, sampled(4, 9, reason=reason), reply, max_turns=max_turns)
    assert held.ended == ended
    assert (len(held.turns) == 2) == (ended == ""), "an observation follows where the conversation goes on, only there"
    assert held.rollout().breakdown == ({"correctness": 1.0} if reply is DONE else {})


def test_a_turn_that_got_no_answer_keeps_its_tokens_and_its_time_and_has_no_reward() -> None:
    held = conversation()
    play(held, sampled(4, 9), MORE)
    play(held, sampled(5, 9), LATE)
    rollout = held.rollout()
    assert (rollout.reward, rollout.status, rollout.detail) == (None, RewardStatus.TIMEOUT, "no answer within 2 s")
    assert rollout.completion_ids == (4, 9, 80, 8, 5, 9)
    assert held.episode.seconds == 2.5


def test_the_environment_hears_turns_it_can_read_and_each_conversation_gets_its_own_answer() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    heard: list[list[AssistantTurn]] = []

    def step(episodes: Sequence[Episode]) -> list[Reply]:
        heard.extend(list(episode.turns) for episode in episodes)
        return [MORE, DONE]

    held = [conversation(index) for index in range(3)]
    turns = [sampled(1, 9), sampled(2, 9), sampled(3, 9, reason="length")]
    texts = [call, call + "<tool_call>oh</tool_call>", "no call"]
    replies = stepper().answer_turns(held, turns, [[(3, 2)], [(4, 2)], [(5, 2)]], texts, step, 20)
    assert replies == {0: MORE, 2: DONE}
    assert heard == [[AssistantTurn(call, (ToolCall("now", {}),), "stop")], [AssistantTurn("no call", (), "length")]]
    assert [one.token_ids for one in held] == [[1, 9, 80, 8], [2, 9, 80, 8], [3, 9]]
    assert [one.spans for one in held] == [[(3, 2)], [(4, 2)], [(5, 2)]]
    first = [one.turns[0] for one in held]
    assert [(turn.num_calls, turn.num_malformed, turn.reward) for turn in first] == [(1, 0, 0.25), (1, 1, 0), (0, 0, 1)]
    assert held[1].turns[1].text.startswith("error: ")
    assert held[1].episode.turns == []


def test_the_environment_is_not_asked_where_no_turn_can_be_read() -> None:
    asked: list[Sequence[Episode]] = []
    held = conversation()

    def step(episodes: Sequence[Episode]) -> list[Reply]:
        asked.append(episodes)
        return []

    text = "<tool_call>oh</tool_call><tool_call>"
    assert stepper().answer_turns([held], [sampled(1, 9)], [[(3, 2)]], [text], step, 20) == {}
    assert asked == []
    assert held.token_ids == [1, 9, 80, 80, 8]


def test_each_call_that_cannot_be_read_is_answered_by_a_message_of_a_tool() -> None:
    reply = malformed_call_reply(stepper().parse("<tool_call>oh</tool_call><tool_call>"))
    assert reply.status is RewardStatus.OK
    assert reply.answer is not None
    assert [message["role"] for message in reply.answer.messages if not isinstance(message, str)] == ["tool", "tool"]
    assert (reply.answer.reward, reply.answer.done, reply.seconds) == (0.0, False, 0.0)
