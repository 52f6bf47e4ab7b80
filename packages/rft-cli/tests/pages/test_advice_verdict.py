"""The verdict on a run where a person reads it: at the end of a run, and on its page."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rft_cli.pages import run_summary
from rft_cli.pages.advice import verdict_lines
from rft_cli.pages.live_panel import LivePanel
from rft_cli.pages.runs import page_of_run
from rft_cli.records.discovery import training_of
from rft_trainer.runs.reader import read_run

FOUND = {"verdict": [{"code": "x", "what": "the reward was 0 [for all]", "do": "look at rollouts/"}]}


def printed(page: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_without_reward(path: Path) -> Path:
    path.mkdir()
    row = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "reward/groups_with_signal": 0, "data/samples": 4}
    text = "".join(json.dumps({"step": step, **row}) + "\n" for step in (1, 2, 3))
    (path / "metrics.jsonl").write_text(text)
    return path


def test_findings_are_two_lines_each_and_none_are_no_lines() -> None:
    lines = verdict_lines(FOUND)
    assert lines is not None
    assert lines.plain.splitlines() == ["found   the reward was 0 [for all]", "   do   look at rollouts/"]
    assert verdict_lines({"verdict": []}) is None
    assert verdict_lines({}) is None  # of a run that an earlier version ended


def test_the_page_of_a_run_that_was_killed_has_the_verdict_on_its_rows(tmp_path: Path) -> None:
    run = run_without_reward(tmp_path / "run")
    assert "the reward was 0 for all 12 responses" in printed(page_of_run(read_run(run)))
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0}\n')
    assert "verdict" not in printed(page_of_run(read_run(run)))


def test_the_end_of_a_run_shows_it_once() -> None:
    shown = {}
    for outcome in ("finished", "interrupted"):
        stream = io.StringIO()
        LivePanel(training_of("rl"), stream=stream).finish({"outcome": outcome, "steps": 3, **FOUND})
        shown[outcome] = stream.getvalue()
    assert "the reward was 0" not in shown["finished"]
    assert "the reward was 0 [for all]" in shown["interrupted"]


def test_the_end_page_has_it_beside_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_without_reward(tmp_path / "run")
    run_summary.show(run, {"outcome": "finished", "steps": 3, "seconds": 1.0, **FOUND}, [])
    out = capsys.readouterr().out
    assert out.index("finished after 3 steps") < out.index("the reward was 0 [for all]") < out.index("run directory")


def test_the_end_page_says_what_bounded_the_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_without_reward(tmp_path / "run")
    bound = {"speed": {"code": "data_bound", "what": "the steps waited [long]", "do": "--num_workers 2"}}
    run_summary.show(run, {"outcome": "finished", "steps": 40, "seconds": 1.0, **bound}, [])
    assert "speed   the steps waited [long]; --num_workers 2" in capsys.readouterr().out
    run_summary.show(run, {"outcome": "finished", "steps": 3, "seconds": 1.0, "speed": None}, [])
    assert "speed" not in capsys.readouterr().out
