"""What the plan of a run on preferences says of its rows and of its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.settings import DpoSettings
from rft_cli.main import main
from rft_cli.pages.run_plan import _loss_lines
from rft_models.settings import AdapterSettings, ModelSettings
from rft_models.tiny_models.text import build_character_model
from rft_trainer.settings.preference_training import PreferenceLossSettings

ROWS = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n), "score": 1} for n in range(1, 5)]


def lines(**loss: Any) -> list[str]:
    settings = DpoSettings(model=ModelSettings(pretrain="m"), loss=PreferenceLossSettings(**loss))
    return _loss_lines(settings)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({}, "sigmoid, beta 0.1"),
        ({"label_smoothing": 0.2}, "sigmoid, beta 0.1, label smoothing 0.2"),
        ({"loss_type": "simpo"}, "simpo, beta 2, gamma 0.5"),
        ({"loss_type": "cpo", "cpo_alpha": 0.5}, "cpo, beta 0.1, likelihood x 0.5"),
        (
            {"ld_alpha": 0.5, "use_weighting": True},
            "sigmoid, beta 0.1, excess tokens x 0.5, pairs weighted by the policy",
        ),
        ({"rpo_alpha": 1.0}, "sigmoid, beta 0.1, + 1 x likelihood of the chosen response"),
        ({"f_divergence": "alpha"}, "sigmoid, beta 0.1, divergence alpha"),
    ],
)
def test_the_loss_is_told_with_its_numbers(loss: dict[str, Any], words: str) -> None:
    assert lines(**loss)[0] == words


def test_where_the_reference_comes_from_is_told() -> None:
    assert "the model as the run begins" in lines()[1]
    assert lines(loss_type="orpo")[1].startswith("no reference")
    adapted = DpoSettings(model=ModelSettings(pretrain="m"), adapter=AdapterSettings(lora_rank=2))
    assert "without its adapters" in _loss_lines(adapted)[1]


def test_rows_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "m"
    build_character_model(model, alphabet="0123456789+=", hidden=8, layers=1, heads=2, ffn=8, seed=0)
    rows = [*ROWS, {**ROWS[0], "rejected": "2"}, {**ROWS[0], "chosen": "1" * 40}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--pretrain", str(model), "--prompt_data", str(tmp_path / "p.jsonl"), "--device", "cpu"]
    assert main(["check", "dpo", *words, "--max_len", "20", "--held_out_rows", "1"]) == 0
    page = capsys.readouterr().out
    assert "source p: 5 rows from" in page
    assert "left out, both responses equal: p:4" in page
    assert "left out, too long: p:5 (" in page
    assert "held out: 1 pairs, kept out of the training rows by seed" in page
    assert "p: not used: score" in page
    assert "p:0/chosen as the model sees it" in page or "/chosen as the model sees it" in page
