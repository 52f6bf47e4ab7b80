"""The example of two small tasks: its commands, as the page shows them, teach a model made from nothing."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main
from rft_trainer.runs.reader import read_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "reverse"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (FOLDER / "README.md").read_text(), flags=re.M | re.S)
MOST_SETTINGS = 8


def commands(task: str) -> list[list[str]]:
    """The words of the page's commands for a task, without the name of the program."""
    (block,) = [block for block in BLOCKS if f"make_data.py {task}" in block]
    return [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.fixture
def reward() -> Any:
    """The file of the rewards, as a module."""
    spec = importlib.util.spec_from_file_location("example_reward", FOLDER / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["reverse", "sort"])
def test_no_command_needs_more_than_eight_settings(task: str) -> None:
    made, *verbs = commands(task)
    assert made == ["examples/reverse/make_data.py", task, f"data/{task}"]
    assert [words[0] for words in verbs] == ["build", "sft", "rl"]
    for words in verbs:
        assert 1 <= sum(word.startswith("--") for word in words) <= MOST_SETTINGS


def test_the_rewards_check_an_answer_by_its_prompt(reward: Any) -> None:
    assert [reward.reverse(text, "reverse: abcd") for text in ("dcba", " dcba\n", "abcd", "")] == [1, 1, 0, 0]
    assert [reward.sort(text, "sort: 4 1 3") for text in ("1 3 4", "4 1 3", "1 3", "")] == [1, 0, 0, 0]


@pytest.mark.night
def test_the_commands_of_the_page_raise_held_out_accuracy_of_reversal_to_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "reverse"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script, *verbs = commands(task)
    monkeypatch.setattr(sys, "argv", script)
    runpy.run_path(script[0], run_name="__main__")
    prompts = [set((tmp_path / "data" / task / f"{name}.jsonl").read_text().splitlines()) for name in ("demos", "test")]
    assert prompts[0]
    assert not prompts[0] & prompts[1]
    for words in verbs:
        assert main(words) == 0
    run = read_run(tmp_path / "runs" / f"{task}-rl")
    before, after = run.accuracy("before"), run.accuracy("after")
    assert before is not None
    assert after is not None
    assert before <= 0.35
    assert after >= max(0.6, before + 0.3)
