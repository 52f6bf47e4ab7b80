"""A run on disk: what is written, what a resume cuts away, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft_core import fault_points
from rft_core.durable_files import read_records
from rft_core.errors import CheckpointError, DataError, OptionsError
from rft_trainer.runs.directory import RunDirectory


def create(path: Path, **options: Any) -> RunDirectory:
    return RunDirectory.create(
        path,
        config_text="seed: 1\n",
        command=["rft-train", "rl", "--save_path", "a b"],
        environment={"python": "3.11"},
        **options,
    )


def filled(path: Path, steps: int) -> RunDirectory:
    run = create(path)
    run.append_evaluation({"step": 0, "name": "before", "accuracy": 0.25})
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "reward/mean": 0.1 * step, "loss": float("nan")})
        if step % 2 == 0:
            run.write_rollouts(step, [{"prompt_id": "a:0", "text": "x\ny"}])
            run.append_evaluation({"step": step, "name": "after", "accuracy": 0.5})
    return run


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    run = filled(tmp_path / "deep" / "run", 2)
    run.write_summary({"outcome": "finished", "seconds": 1.5})
    (run.logs_directory / "rank_0.log").write_text("log")
    assert set(contents(run.path)) == {
        "config.yaml",
        "command.txt",
        "env.json",
        "metrics.jsonl",
        "evals.jsonl",
        "rollouts/step_000002.jsonl",
        "logs/rank_0.log",
        "summary.json",
    }
    assert (run.path / "command.txt").read_text() == "rft-train rl --save_path 'a b'\n"
    assert run.config_file.read_text() == "seed: 1\n"
    assert json.loads((run.path / "env.json").read_text()) == {"python": "3.11"}
    assert run.checkpoints_directory.is_dir()
    assert run.read_summary() == {"outcome": "finished", "seconds": 1.5}
    assert create(tmp_path / "other", recipe_text="lr: 1\n").path.joinpath("recipe.yaml").read_text() == "lr: 1\n"


def test_records_are_read_back_as_written(tmp_path: Path) -> None:
    run = RunDirectory.open(filled(tmp_path / "run", 3).path)
    assert [(row["step"], row["reward/mean"]) for row in run.read_metrics().rows] == [(s, 0.1 * s) for s in (1, 2, 3)]
    assert run.read_metrics().rows[0]["non_finite"] == ["loss"]
    assert [row["name"] for row in run.read_evaluations().rows] == ["before", "after"]
    assert read_records(run.rollout_file(2)).rows == ({"prompt_id": "a:0", "text": "x\ny"},)


@pytest.mark.parametrize("record", [{}, {"step": "1"}, {"step": True}, {"step": -1}, {"step": 1.0}])
def test_a_record_without_a_step_is_an_error(tmp_path: Path, record: dict[str, object]) -> None:
    run = create(tmp_path / "run")
    with pytest.raises(ValueError, match='integer "step"'):
        run.append_metrics(record)
    with pytest.raises(ValueError, match='integer "step"'):
        run.append_evaluation(record)


def test_a_fresh_start_never_writes_over_a_run(tmp_path: Path) -> None:
    run = filled(tmp_path / "my run", 2)
    run.close()
    before = contents(run.path)
    with pytest.raises(OptionsError) as caught:
        create(run.path)
    assert caught.value.problem.do == f"rft-train resume '{run.path}'"
    with pytest.raises(OptionsError) as caught:
        create(run.path, resume_command="rft-train rl --load_checkpoint")
    assert caught.value.problem.do == "rft-train rl --load_checkpoint"
    assert contents(run.path) == before


def test_a_directory_with_other_files_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    create(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_opening_what_is_no_run_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("")
    for path, said in ((tmp_path, "holds some.txt"), (tmp_path / "no", "does not exist")):
        with pytest.raises(CheckpointError, match=said) as caught:
            RunDirectory.open(path)
        assert caught.value.problem.code == "run.not_found"


@given(steps=st.integers(0, 6), cut=st.integers(0, 7), torn=st.sampled_from([b"", b'{"step": 9', b"\x00\x00", b"x\n"]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_run_is_the_run_that_was_stopped_at_that_step(
    tmp_path_factory: pytest.TempPathFactory, steps: int, cut: int, torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("cut")
    run = filled(path / "long", steps)
    run.close()
    for file in (run.metrics_file, run.evaluations_file):
        if file.exists():
            file.write_bytes(file.read_bytes() + torn)
    report = run.cut_after(cut)
    stopped = filled(path / "short", min(steps, cut))
    stopped.close()
    expected = contents(stopped.path)
    if steps and not min(steps, cut):
        expected["metrics.jsonl"] = b""
    assert contents(run.path) == expected
    late = max(0, steps - cut)
    assert report.metrics == late
    assert report.rollout_files == report.evaluations == steps // 2 - min(steps, cut) // 2
    assert report.unreadable_lines == (torn != b"") * (1 + (steps > 0))
    again = run.cut_after(cut)
    assert (again.metrics, again.evaluations, again.rollout_files, again.unreadable_lines) == (0, 0, 0, 0)


def test_a_cut_run_is_continued_in_place(tmp_path: Path) -> None:
    run = filled(tmp_path / "run", 5)
    run.cut_after(3)
    run.append_metrics({"step": 4, "reward/mean": 9.0})
    assert [(row["step"], row["reward/mean"]) for row in run.read_metrics().rows][2:] == [(3, 0.1 * 3), (4, 9.0)]
    assert run.rollout_steps() == [2]


@pytest.mark.parametrize("point", ["run.replace", "run.rename", "run.remove"])
def test_a_cut_that_was_killed_is_completed_by_the_next(tmp_path: Path, point: str) -> None:
    class Killed(BaseException):
        pass

    def kill(name: str) -> None:
        if name == point:
            raise Killed

    run = filled(tmp_path / "run", 6)
    fault_points.install(kill)
    try:
        with pytest.raises(Killed):
            run.cut_after(3)
    finally:
        fault_points.install(None)
    resumed = RunDirectory.open(run.path)
    resumed.cut_after(3)
    assert [row["step"] for row in resumed.read_metrics().rows] == [1, 2, 3]
    assert [row["step"] for row in resumed.read_evaluations().rows] == [0, 2]
    assert resumed.rollout_steps() == [2]


def test_steps_beyond_six_digits_are_ordered_by_number(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    for step in (1_000_000, 999_999):
        run.write_rollouts(step, [])
    assert run.rollout_steps() == [999_999, 1_000_000]
    (run.rollouts_directory / "step_1.jsonl").write_text("")
    (run.rollouts_directory / "notes.txt").write_text("")
    assert run.cut_after(999_999).rollout_files == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_summary_is_named(tmp_path: Path, content: bytes) -> None:
    run = create(tmp_path / "run")
    assert run.read_summary() is None
    run.summary_file.write_bytes(content)
    with pytest.raises(DataError, match=r"summary\.json") as caught:
        run.read_summary()
    assert caught.value.problem.code == "run.bad_summary"


def test_a_run_that_is_cut_back_no_longer_tells_of_an_end(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.write_summary({"outcome": "finished"})
    run.cut_after(3)
    assert run.read_summary() is None
    run.cut_after(3)


def test_a_run_that_is_being_written_cannot_be_written_by_another_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    other = (
        "from pathlib import Path\nfrom rft_trainer.runs.directory import RunDirectory\n"
        f"with RunDirectory(Path({str(run.path)!r})).held(): pass"
    )
    with run.held():
        ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "another process is writing the run" in ended.stderr
    with run.held():
        pass
    assert subprocess.run([sys.executable, "-c", other], check=False).returncode == 0


class RecordedAppender:
    """Notes what becomes of it."""

    made: list[RecordedAppender]

    def __init__(self, file: Path, *, sync_every: int) -> None:
        self.file, self.sync_every, self.log = file, sync_every, list[str]()
        self.made.append(self)

    def sync(self) -> None:
        self.log.append("sync")

    def close(self) -> None:
        self.log.append("close")


def test_all_files_of_records_are_synced_and_closed_and_share_their_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedAppender.made = made = []
    monkeypatch.setattr("rft_trainer.runs.directory.LineAppender", RecordedAppender)
    run = RunDirectory(tmp_path / "a", sync_every=7)
    RunDirectory.create(tmp_path / "b", config_text="", command=[], environment={})
    RunDirectory.create(tmp_path / "c", config_text="", command=[], environment={}, sync_every=5)
    RunDirectory.open(tmp_path / "c")
    RunDirectory.open(tmp_path / "c", sync_every=3)
    RunDirectory(tmp_path / "c")
    assert [one.sync_every for one in made] == [7, 7, 1, 1, 1, 1, 5, 5, 1, 1, 1, 1, 3, 3, 1, 1, 1, 1]
    assert [one.file for one in made[:3]] == [run.metrics_file, run.evaluations_file, run.numerics_file]
    run.sync()
    run.close()
    assert [one.log for one in made[:3]] == [["sync", "close"]] * 3


def test_a_folder_that_is_not_there_has_no_rollouts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "none")
    assert run.rollout_steps() == []
    report = run.cut_after(0)
    assert (report.metrics, report.evaluations, report.rollout_files, report.unreadable_lines) == (0, 0, 0, 0)


def test_only_the_named_marks_make_a_run(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    run = RunDirectory(tmp_path)
    run.refuse_existing(marks=("config.yaml", "checkpoints"))
    with pytest.raises(OptionsError) as caught:
        run.refuse_existing()
    assert caught.value.problem.code == "run.exists"


@pytest.mark.parametrize("file", ["config.json", "model-00001-of-00002.safetensors"])
def test_no_run_is_made_among_the_files_of_a_model(tmp_path: Path, file: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "notes.txt").write_text("mine")
    RunDirectory(model).refuse_existing()
    (model / file).write_text("{}")
    with pytest.raises(OptionsError) as caught:
        RunDirectory(model).refuse_existing()
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("run.holds_a_model", f"--save_path {tmp_path / 'model-2'}")


def test_a_mere_start_holds_nothing_that_anybody_would_miss(tmp_path: Path) -> None:
    def start(name: str) -> RunDirectory:
        return RunDirectory.create(tmp_path / name, config_text="a: 1\n", command=["rft-train"], environment={})

    plain = start("plain")
    for name in ("bundle-20260101-000000-rank0-1.json", "error.json", "logs/rank_0.log", "checkpoints/.staging-1"):
        (plain.path / name).touch()
    assert plain.is_mere_start()
    for name in ("notes.md", "checkpoints/quarantine_step_000001", "rollouts/step_000001.jsonl", "dead"):
        kept = start(f"with {name.replace('/', ' ')}")
        (kept.path / name).touch()
        assert not kept.is_mere_start(), name
    evaluated = start("evaluated")
    evaluated.append_evaluation({"step": 0, "name": "before"})
    assert not evaluated.is_mere_start()
    trained = start("trained")
    trained.append_metrics({"step": 1})
    assert not trained.is_mere_start()
    foreign = tmp_path / "project"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("a: 1\n")
    assert not RunDirectory(foreign).is_mere_start()


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step_000002"])
def test_a_part_of_a_run_is_answered_with_its_run(part: str, tmp_path: Path) -> None:
    (tmp_path / "run" / part).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(CheckpointError) as caught:
        RunDirectory.open(tmp_path / "run" / part)
    assert caught.value.problem.do == f"rft-train resume {tmp_path / 'run'}"
