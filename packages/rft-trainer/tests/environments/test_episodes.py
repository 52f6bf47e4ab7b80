"""Episodes of environments in this process: which are kept, what opens them, what answers them."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.environments import episodes as episodes_module
from rft_trainer.environments.episodes import BuiltinEpisodes, Episode, oldest_kept
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt
from rft_trainer.records.scores import RewardStatus

TOOL = {"type": "function"}


class Counting:
    """Opens with its key; answers the number of turns it has heard, and ends with the third."""

    tools = (TOOL,)
    made = 0

    def __init__(self) -> None:
        Counting.made += 1

    def reset(self, prompt: EnvironmentPrompt, key: int) -> list[str]:
        self.heard = 0
        return [f"{prompt.text} {key}"]

    def step(self, turn: AssistantTurn) -> Answer:
        self.heard += 1
        return Answer([f"{turn.text} {self.heard}"], 0.5, self.heard == 3)


def episode(number: int, *texts: str) -> Episode:
    turns = [AssistantTurn(text) for text in texts]
    return Episode(number, EnvironmentPrompt("p", f"p{number}", None), 10 + number, turns)


def contents(replies: list[Any]) -> list[str]:
    assert all(reply.status is RewardStatus.OK for reply in replies)
    return [message["content"] for reply in replies for message in reply.answer.messages]


def test_episodes_open_and_are_answered_each_by_its_own_environment() -> None:
    runner = BuiltinEpisodes(Counting)
    before = Counting.made
    replies = runner.reset([episode(1), episode(2)])
    assert contents(replies) == ["p1 11", "p2 12"]
    assert [message["role"] for reply in replies if reply.answer for message in reply.answer.messages] == ["user"] * 2  # type: ignore[index]
    assert Counting.made == before + 2
    assert contents(runner.step([episode(2, "a", "b")])) == ["b 1"]
    assert contents(runner.step([episode(1, "c"), episode(2, "d")])) == ["c 1", "d 2"]
    assert runner.tools == (TOOL,)
    assert BuiltinEpisodes(lambda: Counting()).tools == ()


def test_an_episode_that_is_done_is_dropped() -> None:
    runner = BuiltinEpisodes(Counting)
    runner.reset([episode(1), episode(2)])
    for _ in range(3):
        [reply] = runner.step([episode(1, "a")])
    assert reply.answer is not None
    assert (reply.answer.done, reply.answer.reward) == (True, 0.5)
    with pytest.raises(KeyError):
        runner.step([episode(1, "a")])
    assert contents(runner.step([episode(2, "a")])) == ["a 1"]


@pytest.mark.parametrize(("oldest", "kept"), [(None, [6]), (3, [3, 4]), (4, [4]), (0, [2, 3, 4])])
def test_older_episodes_are_dropped_when_others_begin(oldest: int | None, kept: list[int]) -> None:
    runner = BuiltinEpisodes(Counting)
    runner.reset([episode(number) for number in (2, 3, 4)])
    runner.reset([episode(6), episode(7)], oldest)
    for number in (2, 3, 4, 6):
        if number in (*kept, 6):
            runner.step([episode(number, "a")])
        else:
            with pytest.raises(KeyError):
                runner.step([episode(number, "a")])


def test_without_a_number_the_first_of_the_new_ones_is_the_oldest_kept() -> None:
    assert oldest_kept([episode(5), episode(3)], None) == 3
    assert oldest_kept([episode(5), episode(3)], 1) == 1
    assert oldest_kept([episode(5)], 0) == 0
    assert oldest_kept([], None) == 0


def test_a_closed_runner_has_no_episodes() -> None:
    runner = BuiltinEpisodes(Counting)
    runner.reset([episode(1)])
    runner.close()
    with pytest.raises(KeyError):
        runner.step([episode(1, "a")])


def test_a_reply_says_how_long_the_environment_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5])

    class Time:
        perf_counter = staticmethod(lambda: next(clock))

    runner = BuiltinEpisodes(Counting)
    [opened] = runner.reset([episode(1)])
    monkeypatch.setattr(episodes_module, "time", Time)
    [reply] = runner.step([episode(1, "a")])
    assert (opened.seconds, reply.seconds) == (0.0, 2.5)
