"""The list of runs."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.dashboard.run_entries import run_entry
from rft_trainer.runs.directory import RunDirectory

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's records, of which this package knows nothing, say which number is the main one."""
    monkeypatch.setattr("rft.dashboard.run_entries.measures_of", lambda head: ("reward/mean", False, []))


def here(run: Path) -> None:
    (run / "env.json").write_text(json.dumps({"host": socket.gethostname()}))


def test_a_line_has_step_last_value_and_state(make_run: Make) -> None:
    run = make_run(summary={"outcome": "finished", "steps": 3})
    entry = run_entry("d", "runs/mine", run)
    assert (entry.name, entry.verb, entry.state, entry.step, entry.num_steps) == ("mine", "rl", "ended", 3, 9)
    assert (entry.measure, entry.value) == ("reward/mean", 0.75)
    assert entry.touched > 0


def test_a_run_that_is_held_is_running_whatever_its_summary_says(make_run: Make) -> None:
    run = make_run(summary={"outcome": "interrupted"})
    with RunDirectory.open(run).held():
        assert run_entry("d", "", run).state == "running"


def test_a_run_that_wrote_no_summary_has_stopped_or_failed(make_run: Make) -> None:
    run = make_run()
    here(run)
    assert (run_entry("d", "", run).state, run_entry("d", "", run).why) == ("stopped", "")
    bundle = run / "bundle-20260101-000000-rank0-1.json"
    bundle.write_text(json.dumps({"problem": {"what": "the disk is full, api_key=" + "x" * 20}}))
    later = (run / "metrics.jsonl").stat().st_mtime + 5
    os.utime(bundle, (later, later))
    entry = run_entry("d", "", run)
    assert entry.state == "failed"
    assert entry.why.startswith("the disk is full")
    assert "xxxx" not in entry.why
    bundle.write_text(json.dumps({"problem": {"code": "run.stopped", "what": "SIGTERM received; saved at step 3"}}))
    os.utime(bundle, (later, later))
    assert (run_entry("d", "", run).state, run_entry("d", "", run).why) == (
        "stopped",
        "SIGTERM received; saved at step 3",
    )
    # resumed since
    os.utime(run / "metrics.jsonl", (later + 5, later + 5))
    assert run_entry("d", "", run).state == "stopped"


def test_a_run_of_which_nothing_is_left_is_a_line(folder: Path) -> None:
    run = folder / "bare"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    here(run)
    entry = run_entry("d", "", run)
    assert (entry.state, entry.step, entry.value) == ("stopped", None, None)
