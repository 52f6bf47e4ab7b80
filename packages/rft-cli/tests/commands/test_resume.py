"""`rft-train resume`: the command that made the run goes on in its directory, where the run was started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.process import launching
from rft_cli.commands import resume, training
from rft_cli.commands.quickstart import command as quickstart
from rft_cli.config.resolve import resolve
from rft_core.errors import CheckpointError, OptionsError

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Trainings that are continued, each with the directory in which it began."""
    told: Calls = []

    def train(resolved: Any, command: list[str], *, in_place: Path | None = None) -> None:
        values = {key: resolved.values[key] for key in ("pretrain", "seed", "save_path")}
        told.append((resolved.command, values, command, in_place, Path.cwd()))

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(quickstart, "resume", lambda *given: told.append((*given, Path.cwd())) or 7)
    return told


def made(path: Path, command: str, started: Path | None = None) -> Path:
    """Write the files of a run of this command."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(resolve(command, ["--pretrain", "m", "--seed", "3"]).config_yaml)
    (path / "command.txt").write_text(f"rft-train {command} --pretrain m\n")
    if started is not None:
        (path / "env.json").write_text(json.dumps({"working_directory": str(started)}))
    return path


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_run_goes_on_in_its_directory_with_what_is_given(command: str, calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", command)
    assert resume.run(["run", "--seed", "5"]) == 0
    values = {"pretrain": "m", "seed": 5, "save_path": str(run)}
    assert calls == [(command, values, ["rft-train", "resume", "run", "--seed", "5"], run, tmp_path)]


@pytest.mark.parametrize("place", ["started", "gone", "here", None])
def test_paths_are_relative_to_where_the_run_was_started(
    place: str | None, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "started").mkdir()
    started = None if place is None else tmp_path if place == "here" else tmp_path / place
    made(tmp_path / "run", "sft", started)
    assert resume.run(["run"]) == 0
    assert calls[0][-1] == (started if place == "started" else tmp_path)
    assert ("paths are relative" in capsys.readouterr().out) is (place == "started")


@pytest.mark.parametrize("code", [0, 4, None])
def test_a_run_may_go_on_as_ranks(
    code: int | None, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "run", "sft")
    asked: Calls = []

    def spawned(resolved: Any, program: list[str], *, run: Path | None = None) -> int | None:
        asked.append((resolved.values["seed"], program, run))
        return code

    monkeypatch.setattr(launching, "spawned", spawned)
    assert resume.run(["run", "--seed", "5"]) == (code or 0)
    program = [sys.executable, "-m", "rft_cli.main", "resume", str(run), "--seed", "5"]
    assert asked == [(5, program, run)]
    assert len(calls) == (code is None)


def test_a_quickstart_goes_on_by_itself_from_its_directory_or_its_warm_up(calls: Calls, tmp_path: Path) -> None:
    root = tmp_path / "quick"
    (tmp_path / "started").mkdir()
    made(root / quickstart.WARM_START, "sft")
    (root / quickstart.CHOICES).write_text("{}")
    (root / "env.json").write_text(json.dumps({"working_directory": str(tmp_path / "started")}))
    assert resume.run([str(root), "--seed", "5"]) == 7
    assert resume.run([str(root / quickstart.WARM_START)]) == 7
    assert calls == [(root, ["--seed", "5"], tmp_path / "started"), (root, [], tmp_path / "started")]


def test_a_run_of_a_script_is_continued_by_the_script(calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "rl")
    (run / "command.txt").write_text("python train.py\n")
    with pytest.raises(OptionsError) as caught:
        resume.run(["run"])
    assert (caught.value.problem.code, caught.value.problem.where) == ("resume.from_code", str(run / "command.txt"))
    assert calls == []


@pytest.mark.parametrize("header", ["", "recipe: {command: eval}\n", "recipe: a\n"])
def test_a_run_that_names_no_training_is_not_continued(header: str, calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "rl")
    (run / "config.yaml").write_text(header)
    with pytest.raises(OptionsError) as caught:
        resume.run(["run"])
    assert (caught.value.problem.code, caught.value.problem.do) == (
        "resume.unknown_command",
        f"rft-train runs show {run}",
    )


@pytest.mark.parametrize("damage", [b"- a\n", b"seed: 3\0\n", b"\xff\xfe", b"a: [\n"])
def test_settings_that_cannot_be_read_are_told_with_a_way_on(damage: bytes, calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "rl")
    (run / "config.yaml").write_bytes(damage)
    with pytest.raises(CheckpointError) as caught:
        resume.run(["run"])
    assert caught.value.problem.code == "resume.config_damaged"
    assert "--load_checkpoint" in caught.value.problem.do, "there is no record to write the file again from"
    assert calls == []


@pytest.mark.parametrize("damage", [b'{"working_dir', b"\0\0", b"\xff", b""])
def test_a_damaged_record_of_the_place_is_told(damage: bytes, calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "rl")
    (run / "env.json").write_bytes(damage)
    with pytest.raises(CheckpointError) as caught:
        resume.run(["run"])
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("resume.environment_damaged", str(run / "env.json"))
    assert problem.do.startswith(f"mv {run / 'env.json'} ")
    assert calls == []


def test_a_place_that_is_no_text_is_none(calls: Calls, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "rl")
    (run / "env.json").write_text('{"working_directory": 3}')
    assert resume.run(["run"]) == 0
    assert calls[0][-1] == tmp_path


def test_a_home_directory_may_be_written_short(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = made(tmp_path / "run", "rl")
    assert resume.run(["~/run"]) == 0
    assert calls[0][3] == run


@pytest.mark.parametrize("words", [[], ["-h"], ["--help", "more"]])
def test_help_continues_nothing(words: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train resume")
    assert calls == []


def test_a_run_that_everybody_can_write_is_refused_before_anything_of_it_is_read(tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    run_path.mkdir()
    (run_path / "config.yaml").write_text("recipe:\n  command: rl\nreward: x.py:f\n")
    (run_path / "identity.json").write_text("no record")
    (run_path / "config.yaml").chmod(0o666)
    with pytest.raises(OptionsError, match="every user of this machine can write the file") as caught:
        resume.run([str(run_path)])
    assert caught.value.problem.code == "resume.writable_by_others"
    assert caught.value.problem.where == str(run_path / "config.yaml")


def test_whose_run_it_is_is_said_where_it_is_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume, "other_owner", lambda path: "ada\x1b[2J")
    with pytest.raises(CheckpointError):
        resume.run([str(tmp_path)])
    assert "is a run of the user ada\\x1b[2J; the code" in capsys.readouterr().out
