"""A run from the command line and one from Python with the same settings are the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import read_rows
from support.trainer_task import make_trainer_task, same_model

import rft
from rft_cli.main import main


@pytest.mark.parametrize("as_objects", [False, True], ids=["paths", "rows"])
def test_a_run_has_the_same_bits_from_both_sides(
    as_objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    task = make_trainer_task(tmp_path)
    reward = f"{tmp_path / 'reward.py'}:digits"
    assert main(["rl", *task.words(), "--save_path", str(tmp_path / "typed")]) == 0
    settings = dict(task.settings)
    model, data, held_out = (settings.pop(name) for name in ("pretrain", "prompt_data", "eval_data"))
    if as_objects:
        data, held_out = ([json.loads(line) for line in path.read_text().splitlines()] for path in (data, held_out))
    run = rft.rl(model, data, reward, eval_data=held_out, save_path=str(tmp_path / "called"), **settings)
    assert run.outcome == "finished"
    rows = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("typed", "called")]
    assert rows[0] == rows[1]
    assert same_model(tmp_path / "typed", tmp_path / "called")
