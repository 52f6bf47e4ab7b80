"""Continuation from Python: which runs, from where, and with which reward. (Equal bits: test_training_calls.py.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rft
from rft.library import resume
from rft_core.errors import OptionsError


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
