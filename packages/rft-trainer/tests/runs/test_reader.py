"""Run directories as they are read in any state."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rft_core.durable_files import encode_record
from rft_trainer.runs import reader
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.reader import RunFiles, as_object, is_number, is_run, last_rows, read_run, read_text, rows


def run(path: Path, **files: Any) -> RunFiles:
    """A run with these files; lists become JSON lines."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = path / {"metrics": "metrics.jsonl", "evals": "evals.jsonl", "summary": "summary.json"}[name]
        each = content if isinstance(content, list) else [content]
        file.write_text("".join(json.dumps(row) + "\n" for row in each))
    return read_run(path)


def test_an_empty_folder_is_a_run_without_anything(tmp_path: Path) -> None:
    found = read_run(tmp_path)
    assert (found.summary, found.metrics, found.evaluations, found.command) == ({}, [], [], "")
    assert (found.settings, found.checkpoints, found.rollout_files) == ({}, [], [])
    assert (found.step, found.seconds, found.name) == (0, None, tmp_path.name)
    assert found.accuracy("before") is None
    assert not is_run(tmp_path)
    assert read_run(tmp_path / "none").touched == 0.0


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_one_of_its_files_makes_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert is_run(tmp_path)
    assert not is_run(tmp_path / name)


def test_rows_that_are_cut_off_or_no_objects_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n[2]\n{}\n{"step": 2}\n{"step": 3, "lo')
    assert rows(file) == [{"step": 1}, {"step": 2}]
    assert last_rows(file, 1) == [{"step": 2}]
    assert rows(tmp_path / "none") == []
    assert read_text(tmp_path) == ""
    (tmp_path / "summary.json").write_text("{")
    assert read_run(tmp_path).summary == {}
    (tmp_path / "summary.json").write_text("[1]")
    assert read_run(tmp_path).summary == {}


@pytest.mark.parametrize("separator", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\u0085", "\u2028", "\u2029"])
def test_a_sample_with_any_separator_of_lines_in_its_text_is_a_row(tmp_path: Path, separator: str) -> None:
    file, texts = tmp_path / "step_000001.jsonl", [f"a{separator}b", separator, "c"]
    file.write_text("".join(encode_record({"response": text}) + "\n" for text in texts), encoding="utf-8")
    assert rows(file) == [{"response": text} for text in texts]
    assert last_rows(file, 2) == [{"response": text} for text in texts[1:]]


def test_a_run_is_running_as_long_as_a_process_holds_it(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(json.dumps({"host": socket.gethostname()}))
    found = run(tmp_path, metrics=[{"step": 1}])
    assert (found.live, found.outcome) == (False, "stopped")
    with RunDirectory(tmp_path).held():
        for summary in ({}, {"outcome": "interrupted"}):  # of a run that was stopped and goes on
            found = run(tmp_path, summary=summary)
            assert (found.live, found.outcome) == (True, "running")
    assert run(tmp_path, summary={"outcome": "interrupted"}).outcome == "interrupted"
    assert read_run(tmp_path / "none").live is None


def test_a_step_that_is_no_number_is_passed_over(tmp_path: Path) -> None:
    assert run(tmp_path, metrics=[{"step": 3}, {"step": None}, {"step": "x"}]).step == 3


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("old", "new", "closed"), start=1):
        run(tmp_path / name, metrics=[{"step": number}])
        os.utime(tmp_path / name / "metrics.jsonl", (number, number))
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "no_run").mkdir()
    original = reader.read_text

    def refused(path: Path) -> str:
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(reader, "read_text", refused)
    found = reader.read_runs(tmp_path)
    assert [one.name for one in found] == ["new", "old", "closed"]
    assert found[-1].damage == ("cannot be read: Permission denied",)
    assert found[-1].outcome == "unreadable"
    assert reader.read_runs(tmp_path / "nowhere") == []


def test_a_run_whose_process_was_killed_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(json.dumps({"host": socket.gethostname()}))
    run(tmp_path, metrics=[{"step": 1}])
    lock = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    hold = f"import fcntl, os, sys; {lock}; print(flush=True); input()"
    command = [sys.executable, "-S", "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert read_run(tmp_path).outcome == "running"
        holder.kill()
    assert read_run(tmp_path).outcome == "stopped"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": null}',
        '{"step": "x", "loss": 1}',
        '{"foo": 1}',
        "[1]",
        "",
        '{"step": 1, "lo',
        "[" * 100_000,
        f'{{"step": 1{"0" * 400}}}',
        f'{{"step": 1{"0" * 5000}}}',
    ],
    ids=["null", "text", "schema", "list", "empty", "torn", "deep", "huge", "digits"],
)
def test_a_line_that_is_no_record_of_a_step_is_passed_over_and_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2}}\n{line}\n{{"step": 3, "loss": 4}}\n')
    found = read_run(tmp_path)
    assert (found.step, found.series("loss")[0], found.series("loss")[-1]) == (3, 2.0, 4.0)
    [damage] = found.damage
    assert "1 of 3 lines" in damage
    assert damage.endswith("line 2")


def test_a_last_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_run(tmp_path).damage == ()


def test_the_command_of_a_run_is_that_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe:\n  command: distill\n\nseed: 1\n")
    assert read_run(tmp_path).verb == "distill"
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert read_run(tmp_path).verb == ""


def test_the_outcome_of_a_run_of_another_machine_is_that_of_its_summary_or_of_its_silence(tmp_path: Path) -> None:
    found = run(tmp_path, metrics=[{"step": 1}])
    assert (found.live, found.outcome) == (None, "running")
    old = time.time() - reader.STALE_SECONDS - 5
    for each in (tmp_path / "metrics.jsonl", tmp_path):
        os.utime(each, (old, old))
    assert read_run(tmp_path).outcome == "stopped"
    os.utime(tmp_path / "metrics.jsonl", (old + 60, old + 60))
    assert read_run(tmp_path).outcome == "running"
    assert run(tmp_path, summary={"outcome": "interrupted"}).outcome == "interrupted"
    assert run(tmp_path, summary={"steps": 1}).outcome == "finished"


def test_steps_series_and_seconds(tmp_path: Path) -> None:
    metrics = [
        {"step": 1, "loss": 2, "time/step": 3.0},
        {"step": 2, "loss": True, "time/step": 4.0},
        {"step": 5, "loss": 0.5, "x": None},
    ]
    found = run(tmp_path, metrics=metrics)
    assert (found.step, found.series("loss"), found.series("x")) == (5, [2.0, 0.5], [])
    assert found.seconds == 7.0
    assert run(tmp_path, metrics=[*metrics, {"time/elapsed": 9.0}]).seconds == 9.0
    assert run(tmp_path, metrics=[*metrics, {"time/elapsed": 9.0}]).step == 5
    assert run(tmp_path, summary={"seconds": 11}).seconds == 11.0
    assert run(tmp_path, summary={"seconds": None}).seconds == 9.0


def test_accuracies_are_those_of_the_summary_or_of_the_evaluations(tmp_path: Path) -> None:
    first, second, other = ({"eval/accuracy": 0.25}, {"eval/accuracy": 0.5}, {"eval/reward": 1.0})
    one = run(tmp_path, evals=[other, first, other])
    assert (one.accuracy("before"), one.accuracy("after")) == (0.25, None)
    both = run(tmp_path, evals=[first, other, second, other])
    assert (both.accuracy("before"), both.accuracy("after")) == (0.25, 0.5)
    third = {"eval/accuracy": 0.75}
    assert run(tmp_path, evals=[first, second, third]).accuracy("after") == 0.75
    run(tmp_path, evals=[first, other, second, other])
    told = run(tmp_path, summary={"eval": {"before": {"accuracy": 0.0}, "after": {"accuracy": "x"}}})
    assert (told.accuracy("before"), told.accuracy("after")) == (0.0, 0.5)
    assert run(tmp_path, summary={"eval": 3}).accuracy("after") == 0.5
    losses = run(tmp_path / "sft", evals=[{"eval/loss": 2.0}, {"eval/loss": 1.0}])
    assert (losses.measured("loss", "before"), losses.measured("loss", "after")) == (2.0, 1.0)


def test_files_are_listed_in_order_and_only_whole_checkpoints(tmp_path: Path) -> None:
    for step in (20, 10, 30):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        if step != 30:
            (tmp_path / "checkpoints" / f"step_{step}" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "other").mkdir()
    (tmp_path / "rollouts").mkdir()
    for name in ("step_2.jsonl", "step_1.jsonl", "notes.txt"):
        (tmp_path / "rollouts" / name).write_text("")
    (tmp_path / "command.txt").write_text("rft-train rl \n")
    found = read_run(tmp_path)
    assert found.checkpoints == ["step_10", "step_20"]
    assert [file.name for file in found.rollout_files] == ["step_1.jsonl", "step_2.jsonl"]
    assert found.command == "rft-train rl"


def test_settings_that_are_no_defaults_with_their_origins(tmp_path: Path) -> None:
    text = "model:\n  a: 1  # default\nlr: 0.5   # the command line\nseed: 7 # recipe.yaml:3\nname: x\n"
    (tmp_path / "config.yaml").write_text(text)
    assert read_run(tmp_path).settings == {"lr": ("0.5", "the command line"), "seed": ("7", "recipe.yaml:3")}


@pytest.mark.parametrize(
    ("value", "number"), [(1, True), (0.5, True), (True, False), ("1", False), (None, False), (float("nan"), False)]
)
def test_what_is_a_number(value: Any, number: bool) -> None:
    assert is_number(value) is number


def test_what_is_an_object() -> None:
    assert as_object({"a": 1}) == {"a": 1}
    assert as_object([1]) == {}


def test_the_link_to_the_latest_run_is_no_run_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.yaml").touch()
    (tmp_path / "latest").symlink_to("one")
    assert [found.path.name for found in reader.read_runs(tmp_path)] == ["one"]
    assert read_run(tmp_path / "latest").name == "one"
