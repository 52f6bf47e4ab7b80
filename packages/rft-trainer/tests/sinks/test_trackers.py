"""A run reports to the trackers of its settings, and to no other."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rft_core.errors import PreflightError
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.trackers import requested_trackers
from rft_trainer.sinks.trackio import TrackioSink
from rft_trainer.sinks.wandb import WandbSink


def test_each_tracker_of_the_settings_gets_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert requested_trackers(RunSettings()) == []
    sinks = requested_trackers(RunSettings(use_wandb="ours", wandb_org="us", use_trackio="mine"))
    assert [type(sink) for sink in sinks] == [WandbSink, TrackioSink]


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(PreflightError) as caught:
        requested_trackers(RunSettings(use_tensorboard="events"))
    assert caught.value.problem.code == "extra.tensorboard"
