"""Runs that end without an error and have learned nothing say so; runs that learn, or are too short, say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import ForkServer, Prelude
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

REWARDS = """
def zero(responses, labels):
    return [0.0] * len(responses)

def absurd(responses, labels):
    return [1e160 if response.startswith(label) else -1e160 for response, label in zip(responses, labels)]
"""
ENDS: dict[str, tuple[str, list[str], list[str]]] = {
    "the task": ("rl", ["--max_steps", "12"], []),
    "a reward that is always 0": ("rl", ["--max_steps", "3", "--reward", "{rewards}:zero"], ["constant_reward"]),
    "rewards of 1e160": ("rl", ["--max_steps", "3", "--reward", "{rewards}:absurd"], ["no_gradient"]),
    "a learning rate of 1e6": ("rl", ["--max_steps", "12", "--actor_learning_rate", "1e6"], ["no_signal"]),
    "a supervised run": ("sft", ["--max_steps", "12"], []),
    "a supervised run with a learning rate of 1e6": ("sft", ["--learning_rate", "1e6"], ["loss_rose"]),
}


def run(server: ForkServer, words: list[str], path: Path, preludes: list[Prelude]) -> tuple[list[Any], str]:
    # without weight decay: its product with a learning rate of 1e6 would be what ruins the weights
    ended = server.run(*words, "--l2", "0", preludes=preludes)
    assert ended.code == 0, ended.output[-3000:]
    return json.loads((path / "summary.json").read_text())["verdict"], ended.output


@pytest.mark.parametrize("case", ENDS)
def test_the_end_says_what_the_run_came_to(server: ForkServer, task: TinyTask, runs: Path, case: str) -> None:
    (runs / "rewards.py").write_text(REWARDS)
    variant, words, codes = ENDS[case]
    given = [word.format(rewards=runs / "rewards.py") for word in words]
    found, output = run(server, task.words(variant, runs / "run", *given), runs / "run", [])
    assert [finding["code"] for finding in found] == codes
    assert all(finding["what"] in output and finding["do"] in output for finding in found)
    assert ("found   " in output) == bool(codes)


def test_a_run_that_lost_its_metrics_says_which(server: ForkServer, task: TinyTask, runs: Path) -> None:
    path = runs / "run"
    words = task.words("rl", path, "--max_steps", "3")
    found, output = run(server, words, path, [("remove_at", ["rl.rolled_out", 3, str(path / "metrics.jsonl")])])
    (lost,) = found
    assert lost["code"] == "metrics_lost"
    assert "1 to 2" in lost["what"]
    assert lost["what"] in output
    page = server.must_finish("runs", "show", str(path)).output
    assert lost["what"] in " ".join(page.split())


def test_updates_that_change_no_weight_are_told_with_the_setting(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    # without the factors of the task, which would be what is named
    words = ["--lr_factors", "", "--actor_learning_rate", "1e-30", "--max_steps", "4", "--lr_schedule", "constant"]
    _, output = run(server, task.words("rl", runs / "run", *words), runs / "run", [])
    assert "no weight changed in the last 3 steps" in output
    assert "a step of 1e-30 is lost" in output.partition("no weight changed")[2]
