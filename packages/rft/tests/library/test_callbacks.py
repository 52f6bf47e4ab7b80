"""Callbacks: which are called with what, and how one stops a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.library.callbacks import CallbackSink
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.stop_signals import BY_PROGRAM, StopSignals


class Notes(rft.Callback):
    """Keeps what it is called with."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_begin(self, run: rft.Run) -> None:
        self.told.append(("begin", run.name))

    def on_step(self, run: rft.Run, step: int, metrics: Mapping[str, Any]) -> Any:
        self.told.append(("step", step, metrics["reward/mean"]))
        return rft.STOP if step == self.stop_at else None

    def on_evaluation(self, run: rft.Run, step: int, metrics: Mapping[str, Any]) -> Any:
        self.told.append(("evaluation", step, metrics["eval/accuracy"]))

    def on_end(self, run: rft.Run, summary: Mapping[str, Any]) -> None:
        self.told.append(("end", summary["outcome"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    return tmp_path


def test_every_moment_is_told_to_all(folder: Path) -> None:
    both = [Notes(), Notes()]
    sink = CallbackSink(both)
    sink.start(RunInfo(folder.name, folder))
    sink.evaluation({"step": 0, "eval/accuracy": 0.5})
    sink.step({"step": 1, "reward/mean": 0.25})
    sink.finish({"outcome": "finished"})
    told = [("begin", folder.name), ("evaluation", 0, 0.5), ("step", 1, 0.25), ("end", "finished")]
    assert [one.told for one in both] == [told, told]


def test_a_stop_is_asked_of_the_run_once(folder: Path) -> None:
    sink = CallbackSink([Notes(stop_at=2)])
    sink.start(RunInfo(folder.name, folder))
    with StopSignals() as signals:
        sink.step({"step": 1, "reward/mean": 0.0})
        assert signals.received is None
        sink.step({"step": 2, "reward/mean": 0.0})
        assert signals.received == BY_PROGRAM
    with StopSignals() as interrupted:
        interrupted.received = "SIGINT"
        sink.step({"step": 2, "reward/mean": 0.0})
        assert interrupted.received == "SIGINT"


def test_a_callback_need_not_override_anything(folder: Path) -> None:
    sink = CallbackSink([rft.Callback()])
    sink.start(RunInfo(folder.name, folder))
    with StopSignals() as signals:
        sink.step({"step": 1})
        sink.evaluation({"step": 1})
        sink.finish({})
    assert signals.received is None
