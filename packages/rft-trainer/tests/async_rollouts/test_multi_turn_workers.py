"""Conversations and the environments of their workers, by hand: who is asked what, and what stays in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rft_trainer.async_rollouts.multi_turn import ConversationSamples, recorded
from rft_trainer.async_rollouts.partial_conversation import ConversationDraft, ConversationStage, Recorded
from rft_trainer.environments.episodes import Episode, Reply
from rft_trainer.environments.protocol import Answer
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.conversation import ConversationLimits, ConversationStepper
from rft_trainer.testing.bigram import DigitDecoder

PROMPT = Prompt("p", (1,), "1", "1", "p")
MOST = 30


class TokenText:
    """Every message is the token 5."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (5,) * len(messages)

    observation = opening


TAKING = ConversationStepper(
    TokenText(), ToolCallFormat("(?P<malformed>4 4)|(?P<arguments>6)"), ConversationLimits(9, 3)
)


def said(text: str, reward: float = 0.0, done: bool = False) -> Reply:
    return Reply(RewardStatus.OK, Answer([{"role": "user", "content": text}], reward, done), seconds=0.5)


class Runner:
    """Opens with one message, answers every turn with its number, ends after `last`; notes what it is asked."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, last: int = 3) -> None:
        self.resets: list[tuple[list[int], int | None]] = []
        self.steps: list[list[tuple[int, int]]] = []
        self.told: list[Episode] = []
        self.last = last
        self.closed = 0
        self.change: Callable[[int, Reply], Reply] = lambda number, reply: reply
        """From the number of turns heard and the answer to the answer that is given."""

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        assert all((episode.turns, episode.seconds) == ([], 0.0) for episode in episodes)
        self.resets.append(([episode.number for episode in episodes], oldest))
        return [self.change(0, said("hello")) for _ in episodes]

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        self.told += episodes
        self.steps.append([(episode.number, len(episode.turns)) for episode in episodes])
        numbers = [len(episode.turns) for episode in episodes]
        return [self.change(n, said(str(n), 0.25 * n, done=n == self.last)) for n in numbers]

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class Drawn:
    """A turn of an engine."""

    token_ids: tuple[int, ...] = (2, 3)
    finish_reason: str = "stop"
    weight_version: int = 0
    request: int = 0
    logprobs: tuple[float, ...] = (-1.0, -1.0)
    log_kept_mass: tuple[float, ...] = (0.0, 0.0)


def kind_of(*runners: Runner) -> ConversationSamples:
    return ConversationSamples(DigitDecoder(), runners, TAKING, MOST)


def begun(kind: ConversationSamples, num: int) -> list[ConversationDraft]:
    return [one for one in kind.begin(PROMPT, range(100, 100 + num)) if isinstance(one, ConversationDraft)]


def restored(kind: ConversationSamples, drafts: Sequence[ConversationDraft]) -> list[ConversationDraft]:
    states = json.loads(json.dumps([draft.state() for draft in drafts]))
    made = kind.restore(PROMPT, range(100, 100 + len(drafts)), states)
    return [one for one in made if isinstance(one, ConversationDraft)]


def answer(kind: ConversationSamples, *drafts: ConversationDraft) -> None:
    kind.answer(drafts)()


def stages(drafts: Sequence[ConversationDraft]) -> list[str]:
    return [str(draft.stage) for draft in drafts]


def test_conversations_go_to_the_workers_in_turn_with_numbers_of_their_own() -> None:
    kind = kind_of(Runner(), Runner(), Runner())
    assert kind.answers == 3
    first, second = begun(kind, 4), begun(kind, 3)
    assert [draft.worker_index for draft in (*first, *second)] == [0, 1, 2, 0, 1, 2, 0]
    assert [draft.conversation.episode.number for draft in (*first, *second)] == [0, 0, 0, 1, 1, 1, 2]
    assert [draft.conversation.index for draft in second] == [0, 1, 2]
    assert [draft.conversation.key for draft in second] == [100, 101, 102]


def test_all_environments_are_closed() -> None:
    runners = [Runner(), Runner()]
    kind_of(*runners).close()
    assert [runner.closed for runner in runners] == [1, 1]


def test_drafts_of_two_workers_are_not_answered_together() -> None:
    kind = kind_of(Runner(), Runner())
    with pytest.raises(ValueError, match="unpack"):
        kind.answer(begun(kind, 2))


def test_nothing_changes_before_the_answer_is_put() -> None:
    runner = Runner()
    kind = kind_of(runner)
    [draft] = begun(kind, 1)
    put = kind.answer([draft])
    before = (draft.stage, draft.recorded, draft.conversation.token_ids)
    assert before == (ConversationStage.OPENING, [], [])
    put()
    assert draft.stage is ConversationStage.DRAWING
    assert draft.conversation.token_ids == [5]
    assert draft.recorded == [Recorded([{"role": "user", "content": "hello"}], 0.0)]
    assert draft.sampled_turn.budget == 3
    draft.add(Drawn())
    put = kind.answer([draft])
    assert (draft.conversation.token_ids, len(draft.recorded)) == ([5], 1)
    assert draft.conversation.episode.turns == []
    put()
    assert draft.conversation.token_ids == [5, 2, 3, 5]
    assert draft.recorded[1:] == [Recorded([{"role": "user", "content": "1"}], 0.25)]
    assert [(turn.text, turn.reward) for turn in draft.conversation.turns] == [
        ("hello", 0.0),
        ("2 3", 0.25),
        ("1", 0.0),
    ]
    assert draft.conversation.spans == [(0, 2)]
    assert len(runner.resets) == 1


def test_conversations_at_different_stages_are_answered_in_one_round() -> None:
    runner = Runner(last=2)
    kind = kind_of(runner)
    early, late = begun(kind, 2)
    answer(kind, early)
    early.add(Drawn())
    answer(kind, early, late)
    assert stages([early, late]) == ["drawing", "drawing"]
    assert runner.resets == [([0], 0), ([1], 0)]
    assert runner.steps == [[(0, 1)]]
    early.add(Drawn())
    late.add(Drawn())
    answer(kind, early, late)
    assert runner.steps[1:] == [[(0, 2), (1, 1)]]
    assert stages([early, late]) == ["whole", "drawing"]
    assert [[one.reward for one in rows] for rows in kind.rollouts([(PROMPT, [early])])] == [[0.75]]


def test_episodes_are_kept_from_the_oldest_that_may_be_asked_again() -> None:
    runner = Runner(last=1)
    kind = kind_of(runner)
    first, second, third = begun(kind, 3)
    answer(kind, first, second)
    first.add(Drawn())
    answer(kind, first)
    assert first.is_complete
    answer(kind, third)
    assert runner.resets == [([0, 1], 0), ([2], 1)]
    second.add(Drawn())
    third.add(Drawn())
    answer(kind, second, third)
    answer(kind, *begun(kind, 1))
    assert runner.resets[-1] == ([3], 3)


def test_a_turn_that_cannot_be_read_is_answered_without_the_environment() -> None:
    runner = Runner()
    kind = kind_of(runner)
    good, bad = begun(kind, 2)
    answer(kind, good, bad)
    good.add(Drawn())
    bad.add(Drawn((4, 4)))
    answer(kind, good, bad)
    assert runner.steps == [[(0, 1)]]
    assert [len(draft.recorded) for draft in (good, bad)] == [2, 1]
    assert stages([good, bad]) == ["drawing", "drawing"]
    assert bad.conversation.turns[1].num_malformed == 1


def two_turns(runner: Runner, num: int = 1) -> list[ConversationDraft]:
    """Two turns were answered, and the third is being drawn."""
    kind = kind_of(runner)
    drafts = begun(kind, num)
    answer(kind, *drafts)
    for _ in range(2):
        for draft in drafts:
            draft.add(Drawn())
        answer(kind, *drafts)
    for draft in drafts:
        draft.add(Drawn(finish_reason="interrupted"))
    return drafts


def test_recorded_turns_are_replayed_one_after_another_and_nothing_is_asked_twice() -> None:
    before = two_turns(Runner(9), 2)
    before[1].add(Drawn((1,), logprobs=(-1.0,), log_kept_mass=(0.0,)))
    runner = Runner(9)
    kind = kind_of(runner)
    drafts = restored(kind, before)
    put = kind.answer(drafts)
    assert runner.resets == [([0, 1], 0)]
    assert runner.steps == [[(0, 1), (1, 1)], [(0, 2), (1, 2)]]
    assert all(episode.seconds == 0.0 for episode in runner.told)
    put()
    assert stages(drafts) == ["drawing", "asking"]
    assert [draft.conversation.episode.seconds for draft in drafts] == [1.0, 1.0], "those before the stop alone"
    assert drafts[0].sampled_turn.token_ids == [2, 3]


def test_conversations_of_different_lengths_are_replayed_together() -> None:
    runner = Runner(9)
    kind = kind_of(runner)
    [long] = two_turns(Runner(9))
    short = begun(kind_of(Runner(9)), 1)[0]
    drafts = restored(kind, [short, long])
    assert stages(drafts) == ["opening", "restored"]
    answer(kind, *drafts)
    assert runner.steps == [[(1, 1)], [(1, 2)]]
    assert stages(drafts) == ["drawing", "drawing"]


def other_reward(number: int, reply: Reply) -> Reply:
    assert reply.answer is not None
    return replace(reply, answer=replace(reply.answer, reward=reply.answer.reward + (number == 2)))


def other_opening(number: int, reply: Reply) -> Reply:
    return reply if number else said("good day")


def over(number: int, reply: Reply) -> Reply:
    assert reply.answer is not None
    return replace(reply, answer=replace(reply.answer, done=number == 1))


def late(number: int, reply: Reply) -> Reply:
    return Reply(RewardStatus.TIMEOUT, detail="late") if number == 1 else reply


def crashed(number: int, reply: Reply) -> Reply:
    return replace(reply, status=RewardStatus.CRASHED) if number == 1 else reply


@pytest.mark.parametrize(
    ("change", "num_rounds"), [(other_reward, 2), (other_opening, 0), (over, 1), (late, 1), (crashed, 1)]
)
def test_a_conversation_that_is_answered_differently_begins_again_as_a_new_episode(
    change: Callable[[int, Reply], Reply], num_rounds: int
) -> None:
    before = two_turns(Runner(9), 2)
    runner = Runner(9)
    runner.change = change
    kind = kind_of(runner)
    drafts = restored(kind, before)
    answer(kind, *drafts)
    assert len(runner.steps) == num_rounds, "what differs is not replayed further"
    assert stages(drafts) == ["opening", "opening"]
    assert [draft.conversation.episode.number for draft in drafts] == [2, 3]
    assert [draft.recorded for draft in drafts] == [[], []]
    answer(kind, *drafts)
    assert runner.resets == [([0, 1], 0), ([2, 3], 2)], "the old episodes are dropped"


def test_one_conversation_begins_again_while_another_goes_on() -> None:
    before = two_turns(Runner(9), 2)

    class First(Runner):
        """Answers the second turn of the first episode differently."""

        def step(self, episodes: Sequence[Episode]) -> list[Reply]:
            replies = super().step(episodes)
            return [
                said("other") if (one.number, len(one.turns)) == (0, 2) else reply
                for one, reply in zip(episodes, replies, strict=True)
            ]

    runner = First(9)
    kind = kind_of(runner)
    drafts = restored(kind, before)
    answer(kind, *drafts)
    assert stages(drafts) == ["opening", "drawing"]
    assert [draft.conversation.episode.number for draft in drafts] == [2, 1]
    answer(kind, drafts[0])
    assert runner.resets == [([0, 1], 0), ([2], 1)]


def test_what_is_recorded_is_what_json_gives_back() -> None:
    reply = Reply(RewardStatus.OK, Answer([{"role": "tool", "parts": ("a", 1)}], 0.5))
    assert recorded(reply) == Recorded([{"role": "tool", "parts": ["a", 1]}], 0.5)
    assert recorded(Reply(RewardStatus.TIMEOUT)) == Recorded([], 0.0)
