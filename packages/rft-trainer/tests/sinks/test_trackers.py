"""A run reports to the trackers of its settings, and to no other."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.mlflow import MlflowSink
from rft_trainer.sinks.trackers import requested_trackers
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import WandbSink


def test_each_tracker_of_the_settings_gets_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio", "mlflow", "mlflow.entities", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert requested_trackers(RunSettings(), OptionalFiles()) == []
    asked = RunSettings(use_wandb="ours", wandb_org="us", use_trackio="mine", use_mlflow="theirs")
    sinks = requested_trackers(asked, OptionalFiles())
    assert [type(vars(sink)["_sink"]) for sink in sinks] == [WandbSink, TrackioSink, MlflowSink]


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(PreflightError) as caught:
        requested_trackers(RunSettings(use_tensorboard="events"), OptionalFiles())
    assert caught.value.problem.code == "extra.tensorboard"


def test_what_the_settings_say_is_what_the_trackers_are_opened_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[dict[str, Any]] = []

    def keep(**options: Any) -> SimpleNamespace:
        opened.append(options)
        return SimpleNamespace(define_metric=lambda name, **options: None)

    for name in ("wandb", "trackio", "tensorboard", "torch.utils.tensorboard"):
        module = ModuleType(name)
        vars(module).update({"init": keep, "SummaryWriter": keep})
        monkeypatch.setitem(sys.modules, name, module)
    info = RunInfo("fox", tmp_path, {}, None)
    named = RunSettings(
        use_wandb="ours", wandb_org="us", wandb_group="sweep", wandb_run_name="first", use_tensorboard="events"
    )
    for run in (named, RunSettings(use_wandb="ours", use_trackio="mine")):
        for sink in requested_trackers(run, OptionalFiles()):
            sink.start(info)
    first, events, second, trackio = opened
    names = ("project", "entity", "group", "name")
    assert [first[name] for name in names] == ["ours", "us", "sweep", "first"]
    assert [second[name] for name in names] == ["ours", None, None, "fox"]
    assert (events["log_dir"], trackio["project"]) == ("events/fox", "mine")


def test_tensorboard_alone_writes_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    for name in ("tensorboard", "torch.utils.tensorboard"):
        module = ModuleType(name)
        vars(module).update({"SummaryWriter": lambda log_dir, **_: opened.append(log_dir)})
        monkeypatch.setitem(sys.modules, name, module)
    bare = next(field for field in fields(RunSettings) if field.name == "use_tensorboard").metadata["bare"]
    for sink in requested_trackers(RunSettings(use_tensorboard=bare), OptionalFiles()):
        sink.start(RunInfo("fox", tmp_path / "fox"))
    assert opened == [str(tmp_path / "fox" / "tensorboard")]
