"""What an evaluation is compared with: rows, a run, a model, or an error before anything is computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import evaluation_compare
from rft.stages.evaluation_compare import compared_with
from rft.stages.evaluation_output import write_output
from rft_core.errors import CheckpointError, OptionsError


def test_nothing_rows_and_a_model(tmp_path: Path) -> None:
    assert compared_with("") is None
    rows = [{"prompt_id": "p:0", "sample": 0, "reward": 1.0}]
    write_output(tmp_path / "rows.json", {"prompts": 1, "samples": 1}, {}, rows)
    found: Any = compared_with(str(tmp_path / "rows.json"))
    assert (found.rows, found.model) == (rows, "")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    found = compared_with(str(model))
    assert (found.rows, found.model) == ([], str(model))


def test_a_run_is_its_newest_checkpoint_that_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError):
        compared_with(str(tmp_path))
    found = SimpleNamespace(checkpoint=SimpleNamespace(model_directory=tmp_path / "model"))
    monkeypatch.setattr(evaluation_compare, "resolve_checkpoint", lambda path, asked_by: found)
    named: Any = compared_with(str(tmp_path))
    assert (named.name, named.model) == (str(tmp_path), str(tmp_path / "model"))


@pytest.mark.parametrize("place", ["runs/rows.jsonl", "rows.json"])
def test_a_file_that_is_not_there_is_no_model(place: str) -> None:
    with pytest.raises(OptionsError) as caught:
        compared_with(place)
    assert caught.value.problem.code == "eval.compare"
