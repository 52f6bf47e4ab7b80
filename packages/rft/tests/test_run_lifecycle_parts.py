"""Start and end of a run, part by part: where it goes, what it continues, what it writes and says at its end."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft import run_lifecycle
from rft.front_end import SILENT, FrontEnd
from rft.identity.changes import Facts, RunRecord
from rft.identity.continuation import Continuation, nothing_left, twice_as_long
from rft.identity.record import Identity
from rft.run_lifecycle import RunStart
from rft_core.errors import CheckpointError, OptionsError, StorageError
from rft_dist.checkpoint_format.layout import staging_name
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.settings import CheckpointSettings
from rft_trainer.runs import names
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.findings import FindingSink
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.sinks.optional import OptionalSink


class Rank:
    """One rank; broadcasts of the first are kept for the other."""

    def __init__(self, is_first: bool = True, told: bytes = b"") -> None:
        self.is_first, self.device = is_first, "cpu"
        self.ranks = SimpleNamespace(world_size=2)
        self.attached: list[tuple[Path, str]] = []
        self.forgotten = 0
        self.sent: list[bytes | None] = []
        self.collectives = SimpleNamespace(broadcast_bytes=self._broadcast)
        self._told = told

    def _broadcast(self, data: bytes | None) -> bytes:
        self.sent.append(data)
        return self._told if data is None else data

    def attach(self, run: Path, resume_command: str) -> None:
        self.attached.append((run, resume_command))

    def forget_last_failure(self) -> None:
        self.forgotten += 1


def resolved(sources: tuple[Path, ...] = (), **checkpoint: Any) -> Any:
    settings = SimpleNamespace(checkpoint=CheckpointSettings(**checkpoint), run=RunSettings(seed=5))
    return SimpleNamespace(
        settings=settings,
        origins={"load_checkpoint": "the command line", "ckpt_path": "the command line"},
        sources=sources,
        config_yaml="recipe: {command: sft}\n",
        command="sft",
        recipe_name="mine",
        values={"a": 1},
    )


def start(given: Any, path: Path, machine: Any | None = None, *, in_place: bool = False, **options: Any) -> RunStart:
    given.settings.checkpoint = replace(given.settings.checkpoint, save_path=str(path))
    words = ["rft-train", "sft"]
    facts = Facts({}, run_lifecycle.versions(), {})
    at = Continuation(given)
    return run_lifecycle.start(at, words, machine or Rank(), 7, facts, in_place=path if in_place else None, **options)


class Started(RunStart):
    """The start of a run in a directory that exists; `begin` is noted by the front end and changes nothing."""

    def begin(self) -> None:
        self.front.run_begins(self.directory.path)


def started_in(directory: Any, restored: Any = None, machine: Any | None = None, **options: Any) -> RunStart:
    usual: dict[str, Any] = {"front": SILENT, "sinks": [], "lacks_its_end": False, "goes_back": False} | options
    return Started(
        resolved=resolved(),
        command=[],
        machine=machine or Rank(),
        directory=directory,
        restored=restored,
        in_place=True,
        resume_command="",
        record=RunRecord(Identity(command="sft", settings={}, contents={}, versions={}), ""),
        **usual,
    )


def run_at(path: Path, steps: tuple[int, ...] = ()) -> RunDirectory:
    directory = RunDirectory.create(path, config_text="", command=["rft-train"], environment={})
    store = CheckpointStore(directory.checkpoints_directory, keep_last=None, keep_bytes=None, run_id=path.name)
    for step in steps:
        directory.append_metrics({"step": step})
        store.save(
            step,
            tensors={"optimizer": {"a": torch.zeros(1)}},
            records={},
            model_writer=lambda folder: (folder / "config.json").write_text("{}") and None,
            metadata={},
        )
    directory.close()
    return directory


def test_a_path_that_is_given_is_taken_and_another_is_agreed_upon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def path_of(machine: Rank, run_name: str = "", recipe: str = "r", **checkpoint: Any) -> Path:
        given = resolved(**checkpoint)
        given.settings.run, given.recipe_name = RunSettings(run_name=run_name), recipe
        return run_lifecycle.start(Continuation(given), [], machine, 7, Facts({}, {}, {})).directory.path  # type: ignore[arg-type]

    assert path_of(Rank(), save_path="~/x") == tmp_path / "x"
    first, other = Rank(), Rank(False, b"theirs")
    assert path_of(first, "mine") == Path("runs/mine")
    assert first.sent == [b"mine"]
    assert path_of(other, "mine") == Path("runs/theirs")
    assert other.sent == [None]
    drawn = path_of(Rank(), recipe="recipe")
    assert drawn.parent == Path("runs")
    assert "recipe" in drawn.name
    monkeypatch.setattr(names, "WORDS", ("one", "two"))
    free = path_of(Rank(), recipe="recipe")
    taken = {"one": "two", "two": "one"}[free.name.rpartition("-")[2]]
    free.mkdir(parents=True)
    for _ in range(4):
        assert path_of(Rank(), recipe="recipe").name.endswith(taken), "the other name is taken"


def test_a_new_run_changes_nothing_before_it_begins(tmp_path: Path) -> None:
    begun: list[Path] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: 1\n")
    machine, path = Rank(), tmp_path / "run"
    front = FrontEnd(run_begins=begun.append)
    started = start(resolved((tmp_path / "other.yaml", recipe)), path, machine, front=front)
    assert not path.exists()
    assert started.restored is None
    assert not started.lacks_its_end
    assert not started.goes_back
    assert started.resume_command == f"rft-train resume {path}"
    assert machine.attached == [(path, started.resume_command)]
    assert machine.forgotten == 0
    started.begin()
    assert begun == [path]
    assert machine.forgotten == 1
    texts = {file.name: file.read_text() for file in path.iterdir() if file.is_file()}
    assert texts["config.yaml"] == "recipe: {command: sft}\n"
    assert "rft-train sft" in texts["command.txt"]
    assert "a: 1\n" in texts.values()
    variables = json.loads(texts["env.json"])
    assert variables["world_size"] == 2
    assert variables["device"] == "cpu"
    assert variables["working_directory"] == str(Path.cwd())
    assert all(isinstance(row, list) for row in variables["variables"])


def test_a_run_that_appeared_in_the_meantime_is_not_overwritten(tmp_path: Path) -> None:
    started = start(resolved(), tmp_path / "run")
    run_at(tmp_path / "run", (1,))
    with pytest.raises(OptionsError) as caught:
        started.begin()
    assert caught.value.problem.do == f"rft-train resume {tmp_path / 'run'}"


@pytest.mark.parametrize(("name", "told"), [("a processor", "a processor"), ("", "an architecture")])
def test_the_processor_is_told_or_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr(run_lifecycle.platform, "processor", lambda: name)
    monkeypatch.setattr(run_lifecycle.platform, "machine", lambda: "an architecture")
    start(resolved(), tmp_path / "run").begin()
    assert json.loads((tmp_path / "run" / "env.json").read_text())["processor"] == told


def test_without_a_recipe_none_is_written(tmp_path: Path) -> None:
    with_one, without = tmp_path / "a", tmp_path / "b"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: 1\n")
    start(resolved((recipe,)), with_one).begin()
    start(resolved(), without).begin()
    names = [{file.name for file in path.iterdir()} for path in (with_one, without)]
    assert len(names[0] - names[1]) == 1
    assert names[1] < names[0]


def test_a_rank_that_is_not_the_first_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("")
    machine = Rank(False)
    started = start(resolved(), path, machine)
    started.begin()
    assert [file.name for file in path.iterdir()] == ["config.yaml"]
    assert machine.forgotten == 0
    assert machine.attached


def test_a_directory_that_holds_a_run_is_refused_with_what_continues_or_removes_it(tmp_path: Path) -> None:
    saved, empty = run_at(tmp_path / "saved", (1,)), run_at(tmp_path / "empty run")
    for directory, do in (
        (saved, f"rft-train resume {saved.path}"),
        (empty, f"rm -r '{empty.path}'"),
    ):
        with pytest.raises(OptionsError) as caught:
            start(resolved(), directory.path)
        assert do in caught.value.problem.do


def test_a_script_continues_its_run_itself(tmp_path: Path) -> None:
    started = start(resolved(), tmp_path / "run", script="train.py")
    assert started.resume_command == f"train.py, with load_checkpoint=True and save_path={str(tmp_path / 'run')!r}"


def test_a_run_continues_in_place_and_later_rows_are_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rft")
    directory = run_at(tmp_path / "run", (1, 2))
    with RunDirectory.open(directory.path).held():
        pass
    later = RunDirectory.open(directory.path)
    later.append_metrics({"step": 3})
    later.close()
    begun: list[Path] = []
    machine = Rank()
    started = start(resolved(), directory.path, machine, in_place=True, front=FrontEnd(run_begins=begun.append))
    assert started.restored is not None
    assert started.restored.step == 2
    assert started.lacks_its_end
    assert [row["step"] for row in directory.read_metrics().rows] == [1, 2, 3]
    started.begin()
    assert [row["step"] for row in directory.read_metrics().rows] == [1, 2]
    assert begun == [directory.path]
    assert "1 later rows" in caplog.text
    caplog.clear()
    start(resolved(), directory.path, Rank(), in_place=True).begin()
    assert "later rows" not in caplog.text


@pytest.mark.parametrize(("outcome", "lacks"), [("finished", False), ("interrupted", True)])
def test_a_run_that_said_that_it_finished_does_not_lack_its_end(tmp_path: Path, outcome: str, lacks: bool) -> None:
    directory = run_at(tmp_path / "run", (1,))
    (directory.path / "summary.json").write_text(json.dumps({"outcome": outcome}))
    machine = Rank()
    assert start(resolved(), directory.path, machine, in_place=True).lacks_its_end is lacks
    assert machine.sent[-1] == outcome.encode()
    other = Rank(False, str(directory.checkpoints_directory / "step_000001").encode())
    assert start(resolved(), directory.path, other, in_place=True).lacks_its_end
    assert other.sent == [None, None]


@pytest.mark.parametrize("asked", ["resume", "load_checkpoint"])
def test_a_run_that_never_saved_begins_again_in_its_directory(
    tmp_path: Path, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = run_at(tmp_path / "run")
    directory.append_evaluation({"step": 0, "name": "before"})
    directory.close()
    settings, in_place = (resolved(load_checkpoint=True), False) if asked == "load_checkpoint" else (resolved(), True)
    machine = Rank()
    started = start(settings, directory.path, machine, in_place=in_place)
    assert (started.restored, started.in_place, started.begins_again) == (None, False, True)
    assert machine.sent[0] == b""
    assert "begins again" in caplog.text
    assert started.command == (["rft-train"] if in_place else ["rft-train", "sft"])
    assert len(directory.read_evaluations().rows) == 1, "nothing changes before the run begins"
    started.begin()
    assert directory.read_evaluations().rows == ()
    assert RunDirectory.open(directory.path).config_file.read_text() == settings.config_yaml
    other = Rank(False, b"")
    assert start(settings, directory.path, other, in_place=in_place).begins_again


def test_a_run_that_was_killed_in_its_first_save_begins_again_without_its_rows(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run", (1, 2))
    shutil.rmtree(directory.checkpoints_directory)
    left = directory.checkpoints_directory / staging_name(6, "run")
    left.mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        start(resolved(), directory.path, in_place=True)
    assert caught.value.problem.code == "run.checkpoints_missing", "an earlier save than that of step 6 was published"
    left.rename(left.with_name(staging_name(0, "run")))
    started = start(resolved(), directory.path, in_place=True)
    assert started.begins_again
    assert len(directory.read_metrics().rows) == 2, "nothing changes before the run begins"
    started.begin()
    assert directory.read_metrics().rows == ()


def test_what_has_a_damaged_checkpoint_or_no_run_does_not_begin_again(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run")
    (directory.checkpoints_directory / "quarantine_step_000001").mkdir(parents=True)
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints").mkdir(parents=True)
    (foreign / "summary.json").write_text("{}")
    for path in (directory.path, tmp_path / "nothing", foreign):
        with pytest.raises(CheckpointError) as caught:
            start(resolved(load_checkpoint=True), path)
        assert caught.value.exit_code == 5
    with pytest.raises(OptionsError) as refused:
        start(resolved(), directory.path)
    assert refused.value.problem.code == "run.exists"


def test_a_run_that_is_live_does_not_begin_again(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run")
    with directory.held(), pytest.raises(StorageError) as caught:
        start(resolved(load_checkpoint=True), directory.path)
    assert caught.value.problem.code == "run.in_use"


def test_a_run_with_rows_and_no_checkpoint_is_never_advised_to_be_removed(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run", (1, 2))
    shutil.rmtree(directory.checkpoints_directory)
    directory.checkpoints_directory.mkdir()
    with pytest.raises(CheckpointError) as resumed:
        start(resolved(), directory.path, in_place=True)
    assert resumed.value.problem.code == "run.checkpoints_missing"
    assert resumed.value.problem.do == f"rft-train --save_path {tmp_path / 'run-2'}"
    (directory.path / "command.txt").write_text(f"rft-train rl --save_path {directory.path} --seed 1\n")
    (tmp_path / "run-2").mkdir()
    with pytest.raises(CheckpointError) as resumed:
        start(resolved(), directory.path, in_place=True)
    assert resumed.value.problem.do == f"rft-train rl --save_path {tmp_path / 'run-3'} --seed 1"
    (directory.path / "command.txt").write_text(f"rft-train rl --seed 1 --save_path {directory.path}\n")
    with pytest.raises(CheckpointError) as resumed:
        start(resolved(), directory.path, in_place=True)
    assert resumed.value.problem.do == f"rft-train rl --seed 1 --save_path {tmp_path / 'run-3'}"
    with pytest.raises(OptionsError) as again:
        start(resolved(), directory.path)
    assert again.value.problem.do == f"--save_path {tmp_path / 'run-3'}"
    for problem in (resumed.value.problem, again.value.problem):
        assert "rm " not in problem.do
    assert len(directory.read_metrics().rows) == 2


def test_a_run_that_another_process_writes_is_said_to_be_running(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run")
    with directory.held():
        for in_place in (True, False):
            with pytest.raises(StorageError) as caught:
                start(resolved(), directory.path, in_place=in_place)
            assert caught.value.problem.code == "run.in_use"


def test_ranks_continue_from_the_checkpoint_that_the_first_chose(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run", (1, 2))
    first = Rank()
    start(resolved(load_checkpoint=True, save_path=str(directory.path)), directory.path, first)
    assert first.sent[0] == str(directory.checkpoints_directory / "step_000002").encode()
    other = Rank(False, str(directory.checkpoints_directory / "step_000001").encode())
    started = start(resolved(load_checkpoint=True), directory.path, other)
    assert started.restored is not None
    assert started.restored.step == 1


def test_a_missing_checkpoint_is_told_by_the_flag_that_asked(tmp_path: Path) -> None:
    for options, flag in (({"ckpt_path": str(tmp_path / "none")}, "--ckpt_path"), ({}, "--load_checkpoint")):
        with pytest.raises(CheckpointError) as caught:
            start(resolved(load_checkpoint=True, **options), tmp_path / "run")
        problem = caught.value.problem
        assert flag in f"{problem.what} {problem.where} {problem.why} {problem.do}"


def test_a_checkpoint_of_another_run_begins_a_new_one(tmp_path: Path) -> None:
    other = run_at(tmp_path / "other", (1, 2))
    earlier = str(other.checkpoints_directory / "step_000001")
    started = start(resolved(load_checkpoint=True, ckpt_path=earlier), tmp_path / "run")
    assert started.restored is not None
    assert not started.lacks_its_end
    started.begin()
    assert (tmp_path / "run" / "config.yaml").is_file()
    with pytest.raises(OptionsError):
        start(resolved(load_checkpoint=True, ckpt_path=earlier), tmp_path / "run")


def test_a_damaged_later_checkpoint_is_none_to_go_back_behind(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run", (1, 2))
    earlier = str(directory.checkpoints_directory / "step_000001")
    given = resolved(load_checkpoint=True, ckpt_path=earlier)
    assert start(given, directory.path).goes_back
    (directory.checkpoints_directory / "step_000002" / "manifest.json").write_text("{")
    assert not start(given, directory.path).goes_back


class Saver:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def __enter__(self) -> None:
        self.events.append("saver")

    def __exit__(self, *error: object) -> None:
        self.events.append("saver ends")

    def save_again(self, *, episode: int) -> None:
        self.events.append(("again", episode))


class Training:
    def __init__(self, events: list[Any], finished: bool = False) -> None:
        self.finished, self.saver, self.ledger = finished, Saver(events), SimpleNamespace(epoch=4)
        self.events = events

    def run(self, signals: object) -> None:
        self.events.append(("run", signals))
        self.finished = True


class RecordingSink:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def start(self, info: Any) -> None:
        self.events.append(("start", info))

    def finish(self, summary: Any) -> None:
        self.events.append(("finish", summary.get("outcome")))


class Held:
    """A run directory that notes what is done with it."""

    def __init__(self, directory: RunDirectory, events: list[Any]) -> None:
        self._directory, self._events, self.path = directory, events, directory.path

    @contextmanager
    def held(self) -> Any:
        self._events.append("held")
        yield
        self._events.append("let go")

    def sync(self) -> None:
        self._events.append("sync")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)


def executed(tmp_path: Path, *, is_first: bool = True, goes_back: bool = False, **training: Any) -> list[Any]:
    events: list[Any] = []
    directory = Held(run_at(tmp_path / f"run{len(list(tmp_path.iterdir()))}"), events)
    front = FrontEnd(run_begins=lambda _: events.append("begin"))
    sinks = [RecordingSink(events)] if is_first else []
    started = started_in(directory, None, Rank(is_first), front=front, sinks=sinks, goes_back=goes_back)
    loop: Any = Training(events, **training)
    run_lifecycle.execute(loop, started, "signals")  # type: ignore[arg-type]
    return events


def test_a_run_is_held_begun_trained_synced_and_told_in_this_order(tmp_path: Path) -> None:
    events = executed(tmp_path)
    names = [event if isinstance(event, str) else event[0] for event in events]
    assert names == ["held", "begin", "start", "saver", "run", "saver ends", "sync", "finish", "let go"]
    assert events[4] == ("run", "signals")
    assert resolved().values in [getattr(events[2][1], name) for name in events[2][1].__slots__]
    assert events[-2] == ("finish", "finished")
    other = executed(tmp_path, is_first=False)
    assert other == ["begin", "saver", ("run", "signals"), "saver ends", "sync"]
    back = executed(tmp_path, goes_back=True)
    assert back[:3] == ["held", ("again", 4), "begin"]


def test_an_error_in_the_loop_ends_as_interrupted_and_is_raised(tmp_path: Path) -> None:
    events: list[Any] = []
    started = started_in(run_at(tmp_path / "run"), sinks=[RecordingSink(events)])
    running = run_lifecycle.running(Training(events, True), started)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="broken"), running:
        raise RuntimeError("broken")
    assert events[-1] == ("finish", "interrupted")
    with run_lifecycle.running(Training(events), started):  # type: ignore[arg-type]
        pass
    assert events[-1] == ("finish", "interrupted")


def test_a_resume_with_nothing_to_train_is_refused_unless_its_end_is_lacking(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run", (3,))
    restored: Any = SimpleNamespace(step=3)

    def resumed(finished: bool, lacks: bool) -> None:
        started = started_in(directory, restored, lacks_its_end=lacks)
        with run_lifecycle.running(Training([], finished), started):  # type: ignore[arg-type]
            pass

    with pytest.raises(CheckpointError) as caught:
        resumed(True, False)
    assert caught.value.problem.code == "run.finished"
    assert caught.value.problem.do == f"rft-train runs show {directory.path}"
    for values, limit, longer in (
        ({"max_steps": 3, "num_episodes": 9, "max_epochs": 1}, "--max_steps above 3", "max_steps=6 num_episodes=18"),
        ({"max_steps": 0, "num_episodes": 2}, "--num_episodes above 2", "num_episodes=4"),
        ({"max_steps": 8, "max_epochs": 1}, "--max_epochs above 1", "max_steps=16 max_epochs=2"),
    ):
        assert nothing_left(directory.path, 3, values).problem.why.endswith(limit)
        assert twice_as_long(values) == longer.split()
    early: dict[str, Any] = {"max_steps": 8, "max_epochs": 1, "patience": 2}
    assert "--" not in nothing_left(directory.path, 3, early).problem.why
    assert not twice_as_long(early)
    resumed(True, True)
    resumed(False, False)


def test_the_summary_is_computed_from_the_rows_on_disk(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run")
    empty = run_lifecycle.summary_of(directory, resolved(), "interrupted")
    assert empty == {
        "outcome": "interrupted",
        "command": "sft",
        "recipe": "mine",
        "seed": 5,
        "steps": 0,
        "seconds": 0.0,
        "tokens": 0,
        "eval": {},
        "verdict": [],
        "health": [],
        "speed": None,
    }
    opened = RunDirectory.open(directory.path)
    opened.append_metrics({"step": 1, "time/elapsed": 2.0, "data/tokens": 10})
    opened.append_metrics({"step": 4, "time/elapsed": None, "data/tokens": 30})
    for name, step, accuracy in (("before", 0, 0.1), ("after", 2, 0.2), ("during", 3, 0.9), ("after", 4, 0.5)):
        row = {"name": name, "step": step, "time/elapsed": 5.0 + step, "eval/accuracy": accuracy, "other": 1}
        opened.append_evaluation(row)
    opened.close()
    found = run_lifecycle.summary_of(RunDirectory.open(directory.path), resolved(), "finished")
    assert (found["steps"], found["tokens"], found["seconds"]) == (4, 30, 9.0)
    assert found["eval"] == {"before": {"accuracy": 0.1, "step": 0}, "after": {"accuracy": 0.5, "step": 4}}


def test_the_metadata_of_a_checkpoint_names_its_settings_and_data(tmp_path: Path) -> None:
    found = start(resolved(), tmp_path / "run").metadata("abc")
    assert found["config_sha256"] == hashlib.sha256(b"recipe: {command: sft}\n").hexdigest()
    assert (found["data_sha256"], found["seed"], found["command"]) == ("abc", 5, "sft")
    versions: Any = found["versions"]
    assert versions["torch"] == torch.__version__.partition("+")[0]
    assert {"python", "rft", "rft-dist", "transformers"} <= set(versions)


def test_a_package_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lifecycle, "_PACKAGES", ("torch", "no-such-package"))
    found = run_lifecycle.versions()
    assert found["no-such-package"] != found["torch"]
    assert set(found) == {"python", "torch", "no-such-package"}


def test_the_run_directory_is_the_first_sink_then_those_of_the_front_end(tmp_path: Path) -> None:
    asked: list[tuple[RunSettings, int]] = []
    panel: Any = object()
    front = FrontEnd(make_sinks=lambda run, steps: (asked.append((run, steps)), [panel])[1])
    first, second, *_ = start(resolved(), tmp_path / "run", front=front).sinks
    assert isinstance(first, JsonlSink)
    assert second is panel
    assert asked == [(RunSettings(seed=5), 7)]
    assert [type(sink) for sink in start(resolved(), tmp_path / "other").sinks] == [
        JsonlSink,
        FindingSink,
        OptionalSink,
    ]
    assert start(resolved(), tmp_path / "third", Rank(False), front=front).sinks == []


def test_the_end_is_read_by_the_first_rank_and_the_model_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    directory = run_at(tmp_path / "run")
    (directory.path / "summary.json").write_text('{"outcome": "finished"}')
    for machine, summary in ((Rank(), {"outcome": "finished"}), (Rank(False), None)):
        ended: Any = run_lifecycle.execute(Training([]), started_in(directory, machine=machine), None)  # type: ignore[arg-type]
        assert (ended.directory, ended.summary) == (directory, summary)
    assert run_lifecycle.final_model(directory.path) == directory.path / "checkpoints"
    for step in (2, 10):
        (directory.path / "checkpoints" / f"step_{step:06d}" / "model").mkdir(parents=True)
    assert run_lifecycle.final_model(directory.path) == directory.path / "checkpoints" / "step_000010" / "model"
    assert SingleProcess.world_size == 1
