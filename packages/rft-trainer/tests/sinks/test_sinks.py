"""Records reach every tracker in its own form; keys and missing packages are refused before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from rft_core.errors import OptionsError, PreflightError
from rft_trainer.metrics.sink import RunInfo, Sink, evaluation_scalars, scalars
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.sinks.mlflow import MlflowSink
from rft_trainer.sinks.tensorboard import TensorboardSink
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import DEFAULT_PROJECT, WandbSink, wandb_name

KEY = "0123456789abcdef0123456789abcdef01234567"
RECORD = {"step": 3, "reward/mean": 0.5, "loss": None, "non_finite": ["loss"], "note": "text", "done": True, "n": 2}


class Calls:
    """Stands for any object of a tracker; writes down what is called on it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Calls:
            self.made.append((name, args, options))
            return self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for made, args, options in self.made if made == name]


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    monkeypatch.setitem(sys.modules, name, module)


def play(sink: Sink, directory: Path, resumed: int | None = None) -> None:
    sink.start(RunInfo("arith-2025-01-01-fox", directory, {"lr": 0.1}, resumed))
    sink.step(RECORD)
    sink.evaluation({"step": 3, "name": "after", "accuracy": 0.75, "eval/n": 9})
    sink.finish({"outcome": "finished", "eval": {"after": {"accuracy": 0.75}}})


def test_the_run_directory_holds_what_a_sink_was_given(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config_text="", command=["x"], environment={})
    play(JsonlSink(run), run.path)
    assert run.read_metrics().rows == (RECORD,)
    assert run.read_evaluations().rows[0]["accuracy"] == 0.75
    summary = run.read_summary()
    assert summary is not None
    assert summary["outcome"] == "finished"


def test_the_files_of_a_run_are_closed_after_its_summary(tmp_path: Path) -> None:
    calls = Calls()
    play(JsonlSink(cast(RunDirectory, calls)), tmp_path)
    assert [name for name, _, _ in calls.made] == ["append_metrics", "append_evaluation", "write_summary", "close"]


def test_a_package_that_is_there_and_lacks_another_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, broken in (("wandb", False), ("wandb.sdk", False), ("numpy", True)):

        def missing(module: str, name: str = name) -> ModuleType:
            raise ImportError("no", name=name)

        monkeypatch.setattr("rft_trainer.sinks.extras.importlib", SimpleNamespace(import_module=missing))
        with pytest.raises(PreflightError) as caught:
            WandbSink("p")
        assert ("installed, but needs numpy" in caught.value.problem.what) is broken


def test_scalars_are_the_numbers_by_flat_names() -> None:
    assert scalars(RECORD) == {"reward/mean": 0.5, "n": 2}
    assert scalars({"step": 1, "eval": {"after": {"accuracy": 0.5}, "step": 2}}) == {
        "eval/after/accuracy": 0.5,
        "eval/step": 2,
    }


def test_wandb_gets_the_step_as_a_metric_so_that_a_resumed_run_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, summary = Calls(), Calls()
    vars(calls)["summary"] = summary
    installed(monkeypatch, "wandb", init=calls.init)
    play(WandbSink("my-project", entity="org", run_name="first"), tmp_path, resumed=2)
    ((_, options),) = calls.of("init")
    assert (options["project"], options["entity"], options["name"]) == ("my-project", "org", "first")
    assert (options["id"], options["resume"], options["config"]) == ("arith-2025-01-01-fox", "allow", {"lr": 0.1})
    assert calls.of("define_metric") == [(("*",), {"step_metric": "step"})]
    assert [args[0] for args, _ in calls.of("log")] == [
        {"step": 3, "reward/mean": 0.5, "n": 2},
        {"step": 3, "eval/accuracy": 0.75, "eval/n": 9},
    ]
    assert summary.of("update") == [(({"eval/after/accuracy": 0.75},), {})]
    assert calls.of("finish") == [((), {"exit_code": 0})]


def test_trackio_gets_numbers_at_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    installed(monkeypatch, "trackio", init=calls.init, log=calls.log, finish=calls.finish)
    play(TrackioSink("proj"), tmp_path)
    options = {"project": "proj", "name": "arith-2025-01-01-fox", "config": {"lr": 0.1}, "resume": "allow"}
    assert calls.of("init") == [((), options)]
    assert calls.of("log") == [
        (({"reward/mean": 0.5, "n": 2},), {"step": 3}),
        (({"eval/accuracy": 0.75, "eval/n": 9},), {"step": 3}),
    ]
    assert calls.of("finish") == [((), {})]


@pytest.mark.parametrize(("resumed", "purge"), [(None, None), (2, 3)])
def test_tensorboard_gets_scalars_and_hides_steps_that_a_resume_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: int | None, purge: int | None
) -> None:
    calls = Calls()
    installed(monkeypatch, "tensorboard")
    installed(monkeypatch, "torch.utils.tensorboard", SummaryWriter=calls.writer)
    play(TensorboardSink(), tmp_path, resumed)
    assert calls.of("writer") == [((), {"log_dir": str(tmp_path / "tensorboard"), "purge_step": purge})]
    assert [args for args, _ in calls.of("add_scalar")] == [
        ("reward/mean", 0.5, 3),
        ("n", 2, 3),
        ("eval/accuracy", 0.75, 3),
        ("eval/n", 9, 3),
    ]
    assert len(calls.of("close")) == 1
    assert [name for name, _, _ in calls.made if name != "add_scalar"] == ["writer", "flush", "flush", "close"]
    play(TensorboardSink(tmp_path / "own"), tmp_path)
    # a folder of its own for each run: files of two runs in one are drawn as one curve
    assert calls.of("writer")[1][1]["log_dir"] == str(tmp_path / "own" / "arith-2025-01-01-fox")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WandbSink("p"), "wandb"),
        (TensorboardSink, "tensorboard"),
        (lambda: TrackioSink("p"), "trackio"),
        (lambda: MlflowSink("p"), "mlflow"),
    ],
)
def test_a_missing_extra_is_one_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, make: Any, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    installed(monkeypatch, "torch.utils.tensorboard")  # a part of torch, which is there whatever else is
    with pytest.raises(PreflightError) as caught:
        make()
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.do) == (
        f"extra.{name}",
        f"--use_{name}",
        f"uv sync --no-dev --inexact --extra {name}",
    )


@pytest.mark.parametrize(
    "value",
    [KEY, KEY.upper(), f" {KEY} ", f"local-{KEY}", f"me/{KEY}", "wandb_v1_" + "Ab3" * 25, "WANDB_V1_x", "wandb_v2_abc"],
)
def test_what_looks_like_a_key_is_refused_and_never_shown(value: str) -> None:
    for make in (
        lambda: wandb_name(value),
        lambda: WandbSink("p", entity=value),
        lambda: WandbSink("p", run_name=value),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert caught.value.problem.code == "tracker.key_as_name"
        shown = caught.value.problem.as_text() + caught.value.problem.as_json(2) + repr(caught.value)
        assert value.strip().lower() not in shown.lower()
        assert KEY not in shown.lower()


def test_projects_are_names_and_a_bare_flag_is_the_default() -> None:
    assert wandb_name(" my-project ") == "my-project"
    assert wandb_name(True) == wandb_name("") == DEFAULT_PROJECT
    assert wandb_name("a" * 39) == "a" * 39
    assert wandb_name("f" * 41) == "f" * 41
    with pytest.raises(OptionsError) as caught:
        wandb_name("a/b:c")
    assert caught.value.problem.do == "--use_wandb a-b-c"
    with pytest.raises(OptionsError, match="129 characters") as caught:
        wandb_name("x" * 129)
    assert caught.value.problem.code == "tracker.bad_name"


def test_averages_are_shown_under_their_own_name() -> None:
    shown = evaluation_scalars({"step": 4, "eval/accuracy": 0.5, "eval_ema/accuracy": 0.75, "time/elapsed": 2.0})
    assert shown == {"eval/accuracy": 0.5, "eval_ema/accuracy": 0.75, "eval/time/elapsed": 2.0}
