"""Commands that the last lines of a page propose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rft_cli.commands.table import SFT
from rft_cli.pages.advice import after_model, after_rl, next_lines
from rft_cli.records import discovery


def test_a_model_is_proposed_to_every_command_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SFT.training is not None
    distilled = replace(SFT, name="distill", training=replace(SFT.training, purpose="distil into it"))
    known = discovery.commands() | {"distill": distilled}
    monkeypatch.setattr(discovery, "commands", lambda: known)
    proposed = after_model(Path("models/new"))
    assert [command.split()[:4] for command, _ in proposed] == [
        ["rft-train", name, "--pretrain", "models/new"] for name in ("sft", "pretrain", "dpo", "rm", "rl", "distill")
    ]
    assert next_lines(proposed[-1:]) == [
        "next:",
        "  rft-train distill --pretrain models/new --prompt_data train.jsonl",
        "      distil into it",
    ]


@pytest.mark.parametrize(
    ("row", "command"),
    [
        ('{"step": 0, "eval/accuracy": 0.5}', "rft-train eval {run}"),
        ('{"step": 0}', "rft-train eval {run} --eval_data test.jsonl"),
    ],
)
def test_an_evaluation_is_proposed_with_the_rows_that_a_run_lacks(row: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "evals.jsonl").write_text(row + "\n")
    assert after_rl(tmp_path)[0][0] == command.format(run=tmp_path)
