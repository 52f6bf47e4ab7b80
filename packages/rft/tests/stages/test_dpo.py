"""Runs on preferences from their settings: they learn, their reference is kept, they go on as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rft
from rft.config.errors import SettingsError
from rft.stages.dpo import REFERENCE_FILE
from rft_models.tiny_models.text import build_character_model

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + wrong)}
    for a in range(4)
    for b in range(4)
    for wrong in (1, 3)
]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "learning_rate": 3e-3,
    "lr_schedule": "constant",
    "lr_warmup_ratio": 0.0,
    "train_batch_size": 8,
    "save_interval": 0,
    "panel": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    build_character_model(path, alphabet="0123456789+=", hidden=32, layers=1, heads=2, ffn=32, seed=0)
    return path


def weights(run: rft.Run) -> dict[str, torch.Tensor]:
    return load_file(sorted(run.path.glob("checkpoints/step_*/model/model.safetensors"))[-1])


def test_a_run_puts_pairs_in_order_and_keeps_its_reference(model: Path) -> None:
    run = rft.dpo(model, PAIRS, eval_data=PAIRS[:8], save_path="run", max_epochs=5, eval_steps=0, **SETTINGS)
    before, after = (json.loads(line) for line in _first_and_last(run.path / "evals.jsonl"))
    assert before["eval/accuracy"] == 0.5
    assert before["eval/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert after["eval/accuracy"] > 0.8
    assert after["eval/loss"] < before["eval/loss"]
    kept = load_file(run.path / REFERENCE_FILE)
    assert int(kept["lengths"].sum()) == len(kept["logprobs"])


def _first_and_last(file: Path) -> tuple[str, str]:
    lines = file.read_text().splitlines()
    return lines[0], lines[-1]


def test_a_run_that_lost_its_reference_asks_the_model_that_it_began_with(model: Path) -> None:
    whole = rft.dpo(model, PAIRS, save_path="whole", max_steps=4, **SETTINGS)
    stopping = [_StopAt(2)]
    half = rft.dpo(model, PAIRS, save_path="half", max_steps=4, callbacks=stopping, **SETTINGS)
    (half.path / REFERENCE_FILE).unlink()
    again = half.resume(panel=False)
    for name, weight in weights(whole).items():
        assert torch.allclose(weight, weights(again)[name], rtol=1e-6, atol=1e-8), name


class _StopAt(rft.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: rft.Run, step: int, metrics: Any) -> Any:
        return rft.STOP if step == self.step else None


@pytest.mark.parametrize("loss_type", ["simpo", "kto"])
def test_losses_with_and_without_a_reference_run(model: Path, loss_type: Any) -> None:
    run = rft.dpo(
        model, PAIRS, eval_data=PAIRS[:4], save_path="run", loss_type=loss_type, max_samples=4, max_epochs=4, **SETTINGS
    )
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert (run.path / REFERENCE_FILE).exists() == (loss_type == "kto")
    assert ("dpo/reference_point" in rows[-1]) == (loss_type == "kto")
    assert rows[-1]["dpo/loss"] < rows[0]["dpo/loss"]


def test_adapters_leave_the_model_as_the_reference(model: Path) -> None:
    run = rft.dpo(model, PAIRS, eval_data=PAIRS[:4], save_path="run", lora_rank=4, max_steps=3, **SETTINGS)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["dpo/margin"] > 0


def test_contradictions_are_told_before_anything_is_loaded() -> None:
    with pytest.raises(SettingsError) as raised:
        rft.dpo("nowhere", PAIRS, loss_type="simpo", label_smoothing=0.1)
    assert "dpo.other_loss" in [problem.code for problem in raised.value.problems]
