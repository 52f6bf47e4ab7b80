"""Environments by name: those of this package, those of a user's file, and words that are neither."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.environments import user_environment
from rft_trainer.environments.episodes import BuiltinEpisodes, Episode
from rft_trainer.environments.protocol import AssistantTurn, EnvironmentPrompt
from rft_trainer.environments.registry import NAMES, environment_by_name, has_processes, is_known, unknown_environment
from rft_trainer.workers.limits import ProcessLimits


def test_every_name_is_an_environment_of_its_own_that_can_be_asked() -> None:
    tools: dict[str, int] = {}
    for name in NAMES:
        runner = environment_by_name(name)
        assert isinstance(runner, BuiltinEpisodes)
        episode = Episode(0, EnvironmentPrompt("p", "?", "7"), 1, [AssistantTurn("7")])
        runner.reset([episode])
        [reply] = runner.step([episode])
        assert reply.answer is not None
        assert reply.answer.reward == 1.0
        tools[name] = len(runner.tools)
        assert is_known(name)
        assert not has_processes(name)
    assert tools == {"calculator": 1, "calculator-noise": 1, "guess-number": 0, "guess-number-noise": 0}


def test_a_class_of_a_file_has_its_processes_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(user_environment, "UserEpisodes", lambda *given, **options: made.append((given, options)))
    environment_by_name("a:b.py:Mine")
    limits = ProcessLimits(data_bytes=7)
    environment_by_name("c.py:Mine", num_workers=3, tool_timeout=2.0, rollout_timeout=4.0, limits=limits)
    assert made == [
        (("a:b.py", "Mine"), {"num_workers": 1, "tool_timeout": 10.0, "rollout_timeout": 60.0, "limits": None}),
        (("c.py", "Mine"), {"num_workers": 3, "tool_timeout": 2.0, "rollout_timeout": 4.0, "limits": limits}),
    ]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("calculater", "--environment calculator"),
        ("guess", "--environment guess-number"),
        ("mine.py", "--environment mine.py:Environment"),
        (":Mine", "--environment "),
        ("mine.py:", "--environment "),
    ],
)
def test_another_word_is_refused_with_the_most_similar(name: str, remedy: str) -> None:
    assert not is_known(name)
    with pytest.raises(OptionsError) as caught:
        environment_by_name(name)
    assert caught.value.problem.code == "environment.unknown"
    assert caught.value.problem.do.startswith(remedy)
    assert unknown_environment(name).names == ("environment",)


def test_a_class_of_a_file_is_known_before_it_is_loaded() -> None:
    assert is_known("nowhere.py:Mine")
    assert has_processes("nowhere.py:Mine")
