"""An environment of one's own: in a process that is killed at a deadline; others go on, and nothing becomes a 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.environments.episodes import Episode
from rft_trainer.environments.protocol import AssistantTurn, EnvironmentPrompt, ToolCall
from rft_trainer.environments.registry import environment_by_name
from rft_trainer.environments.user_environment import UserEpisodes
from rft_trainer.records.scores import RewardStatus

SOURCE = '''
import os, time
from rft_trainer.environments.protocol import Answer

class Memory:
    """Answers with all it has heard."""

    tools = [{"type": "function", "function": {"name": "recall"}}]

    def reset(self, prompt, key):
        self.heard = [prompt.label, str(key)]
        return ["rules"] if prompt.text == "long" else None

    def step(self, turn):
        if "hang" in turn.text:
            time.sleep(60)
        if "die" in turn.text:
            os._exit(3)
        if "raise" in turn.text:
            raise ValueError("no such word")
        if "nothing" in turn.text:
            return None
        self.heard.append(turn.text)
        return Answer([" ".join(self.heard)], reward=0.25 * len(self.heard), done="bye" in turn.text)

class Needy:
    def __init__(self, need): ...
    def reset(self, prompt, key): ...
    def step(self, turn): ...

class Deaf:
    def reset(self, prompt, key): ...
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "memory.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runner(file: Path) -> Iterator[UserEpisodes]:
    made = UserEpisodes(str(file), "Memory", num_workers=2, tool_timeout=0.5, rollout_timeout=30.0)
    yield made
    made.close()


def episodes(count: int) -> list[Episode]:
    return [Episode(i, EnvironmentPrompt(f"p:{i}", "text", f"L{i}"), 7) for i in range(count)]


def say(runner: UserEpisodes, chosen: list[Episode], *texts: str) -> list[object]:
    for episode, text in zip(chosen, texts, strict=True):
        episode.turns.append(AssistantTurn(text, (ToolCall("recall", {}),) if "call" in text else ()))
    return [
        reply.status if reply.answer is None else reply.answer.messages[0]["content"]  # type: ignore[index]
        for reply in runner.step(chosen)
    ]


def test_episodes_keep_their_state_apart(runner: UserEpisodes) -> None:
    assert runner.tools == ({"type": "function", "function": {"name": "recall"}},)
    chosen = episodes(3)
    assert [reply.answer.messages for reply in runner.reset(chosen) if reply.answer] == [[], [], []]
    assert say(runner, chosen, "a", "b", "c") == ["L0 7 a", "L1 7 b", "L2 7 c"]
    assert say(runner, chosen[:2], "d", "e") == ["L0 7 a d", "L1 7 b e"]


def test_messages_that_open_a_conversation_are_the_users(runner: UserEpisodes) -> None:
    [reply] = runner.reset([Episode(0, EnvironmentPrompt("p", "long", None), 1)])
    assert reply.answer is not None
    assert reply.answer.messages == [{"role": "user", "content": "rules"}]


def test_a_hung_tool_ends_its_conversation_alone(runner: UserEpisodes) -> None:
    chosen = episodes(4)  # 0 and 2 in one process, 1 and 3 in the other
    runner.reset(chosen)
    say(runner, chosen, "a", "b", "c", "d")
    assert say(runner, chosen, "hang", "e", "f", "g") == [RewardStatus.TIMEOUT, "L1 7 b e", "L2 7 c f", "L3 7 d g"]
    assert say(runner, chosen[1:], "h", "die", "i") == ["L1 7 b e h", RewardStatus.CRASHED, "L3 7 d g i"]


def test_what_is_raised_is_told_with_its_line(runner: UserEpisodes) -> None:
    chosen = episodes(1)
    runner.reset(chosen)
    chosen[0].turns.append(AssistantTurn("raise"))
    [reply] = runner.step(chosen)
    line = 1 + SOURCE[: SOURCE.index("raise ValueError")].count("\n")
    assert (reply.status, reply.answer) == (RewardStatus.FAILED, None)
    assert "ValueError: no such word" in reply.detail
    assert f"memory.py:{line}" in reply.detail


def test_an_answer_that_is_none_is_a_failure(runner: UserEpisodes) -> None:
    chosen = episodes(1)
    runner.reset(chosen)
    assert say(runner, chosen, "nothing") == [RewardStatus.FAILED]


def test_a_conversation_has_a_deadline_in_all(file: Path) -> None:
    runner = UserEpisodes(str(file), "Memory", rollout_timeout=5.0)
    chosen = episodes(1)
    runner.reset(chosen)
    chosen[0].seconds = 5.0
    assert say(runner, chosen, "late") == [RewardStatus.TIMEOUT]
    runner.close()


def test_every_call_of_a_turn_has_its_own_seconds(file: Path) -> None:
    runner = UserEpisodes(str(file), "Memory", tool_timeout=2.0, rollout_timeout=5.0)
    [episode] = episodes(1)
    runner.reset([episode])
    episode.turns.append(AssistantTurn("", (ToolCall("a", {}), ToolCall("b", {}))))
    assert runner._allowed(episode) == 4.0
    episode.seconds = 2.0
    assert runner._allowed(episode) == 3.0
    runner.close()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("{file}:Memry", "environment.class_missing"),
        ("{file}:Needy", "environment.class"),
        ("{file}:Deaf", "environment.class"),
        ("none.py:Memory", "environment.file_missing"),
        ("calculater", "environment.unknown"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(file: Path, name: str, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        environment_by_name(name.format(file=file))
    assert caught.value.problem.code == code


def test_a_file_that_raises_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('no')\n")
    with pytest.raises(DataError, match=r"bad\.py:2") as caught:
        environment_by_name(f"{tmp_path / 'bad.py'}:X")
    assert caught.value.problem.code == "environment.import"
