"""The controls of a quickstart change what they name in its second stage, or are refused where it has none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands import training
from rft_cli.commands.quickstart import command as quickstart
from rft_cli.commands.quickstart.tasks import TASKS
from rft_core.errors import OptionsError
from rft_trainer.environments.registry import NAMES

TALKS = ("calculator", "guess-number")


@pytest.fixture
def second_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings with which reinforcement learning would begin."""
    (tmp_path / quickstart.WARM_START / "checkpoints" / "step_000001" / "model").mkdir(parents=True)
    begun: list[Any] = []
    monkeypatch.setattr(training, "train", lambda resolved, command: begun.append(resolved.settings))

    def start(*words: str) -> Any:
        quickstart._second_stage(tmp_path, quickstart.parse(list(words)), ["rft-train", "quickstart"])
        return begun[-1]

    return start


@pytest.mark.parametrize("task", TALKS)
def test_noisy_answers_take_the_place_of_the_environment(second_stage: Any, task: str) -> None:
    plain, noisy = second_stage("--task", task), second_stage("--task", task, "--control", "noisy_answers")
    assert plain.conversation.environment == task
    assert noisy.conversation.environment == f"{task}-noise"
    assert {plain.conversation.environment, noisy.conversation.environment} <= set(NAMES)
    assert plain.conversation.max_turns == noisy.conversation.max_turns


@pytest.mark.parametrize("task", sorted(set(TASKS) - set(TALKS)))
def test_noisy_answers_are_refused_where_nobody_answers(task: str) -> None:
    with pytest.raises(OptionsError) as caught:
        quickstart.parse(["--task", task, "--control", "noisy_answers"])
    assert caught.value.problem.code == "option.quickstart"


def test_shuffled_images_are_refused_where_there_are_none() -> None:
    with pytest.raises(OptionsError) as caught:
        quickstart.parse(["--task", "calculator", "--control", "shuffled_images"])
    assert caught.value.problem.code == "option.quickstart"


@pytest.mark.parametrize("task", TALKS)
def test_an_evaluation_by_itself_holds_the_conversations_of_the_training(second_stage: Any, task: str) -> None:
    words = dict(zip(TASKS[task].eval_words[1::2], TASKS[task].eval_words[2::2], strict=True))
    settings = second_stage("--task", task)
    assert words["--environment"] == settings.conversation.environment
    assert int(words["--generate_max_len"]) == settings.sampling.generate_max_len
    assert int(words["--max_turns"]) == settings.conversation.max_turns
