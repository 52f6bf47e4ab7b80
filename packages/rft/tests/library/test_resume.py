"""Continuation from Python: which runs, from where, and with which reward. (Equal bits: test_training_calls.py.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.identity.continuation import nothing_left
from rft.library import resume
from rft_core.errors import CheckpointError, OptionsError


def ones(responses: list[str]) -> list[float]:
    return [1.0 for _ in responses]


@pytest.mark.parametrize("text", ["recipe:\n  command: repeat\n", "seed: 1\n", "recipe: ["])
def test_a_run_of_another_command_is_left_to_the_command_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(OptionsError, match=f"rft-train resume {tmp_path}"):
        rft.Run(tmp_path).resume()


def test_paths_are_relative_to_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, began = tmp_path / "run", tmp_path / "began"
    run.mkdir()
    began.mkdir()
    (run / "config.yaml").write_text("recipe:\n  command: sft\npretrain: m\n")
    found: list[tuple[Path, Path | None]] = []

    def train(*_: object, in_place: Path | None = None, **__: object) -> rft.Run:
        found.append((Path.cwd(), in_place))
        return rft.Run(run)

    monkeypatch.setattr(resume, "train", train)
    here = Path.cwd()
    for recorded in (json.dumps({"working_directory": str(began)}), '{"working_directory": "/nowhere"}', "{", "[]"):
        (run / "env.json").write_text(recorded)
        rft.Run(run).resume()
    assert found == [(began, run), (here, run), (here, run), (here, run)]
    assert Path.cwd() == here


@pytest.mark.parametrize(
    ("reward", "settings", "call"),
    [
        (None, "max_steps: 3\nnum_episodes: 1\n", "resume(max_steps=6, num_episodes=2)"),
        (["exact", ones], "reward: in-process:'exact'+ones\n", "resume(reward=['exact', ones], num_episodes=2)"),
    ],
)
def test_a_finished_run_is_answered_with_the_call_that_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: Any, settings: str, call: str
) -> None:
    (tmp_path / "config.yaml").write_text(f"recipe:\n  command: rl\npretrain: m\nprompt_data: d\n{settings}")

    def train(*_: object, **__: object) -> rft.Run:
        raise nothing_left(tmp_path, 3, {"max_steps": 3})

    monkeypatch.setattr(resume, "train", train)
    with pytest.raises(CheckpointError) as caught:
        rft.Run(tmp_path).resume(reward=reward)
    assert caught.value.problem.do == f"rft.Run({str(tmp_path)!r}).{call}"
    assert "--" not in str(caught.value)
