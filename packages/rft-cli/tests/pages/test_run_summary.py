"""End page of a run: responses that had no reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_cli.pages import run_summary


@pytest.mark.parametrize("logged", [True, False])
def test_responses_without_a_reward_are_counted_by_kind(
    logged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"step": 1, "data/samples": 32, "reward/unscored_none": 2, "reward/unscored_exception": 1},
        {"step": 2, "data/samples": 32},
        {"step": 3, "data/samples": 32, "reward/unscored_none": 4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("")
    if logged:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "reward-0.log").write_text("x")
    run_summary.show(tmp_path, {"outcome": "finished", "steps": 3}, [])
    shown = " ".join(capsys.readouterr().out.split())
    assert "without a reward: 7 of 96 responses (none 6, exception 1)" in shown
    assert ("reward-0.log" in shown) is logged


def test_nothing_is_said_where_every_response_had_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data/samples": 32}\n')
    (tmp_path / "config.yaml").write_text("")
    run_summary.show(tmp_path, {"outcome": "finished", "steps": 1}, [])
    assert "without a reward" not in capsys.readouterr().out
