"""Recording of some steps: which ones, what is written, and that nothing is left running."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.settings.run import RunSettings
from rft_trainer.sinks.profile.asked import ask
from rft_trainer.sinks.profile.requested import requested_profile
from rft_trainer.sinks.profile.sink import ProfileSink
from rft_trainer.sinks.profile.steps import ProfiledSteps


def sink_of(first: int, last: int, **more: Any) -> ProfileSink:
    return ProfileSink(ProfiledSteps(first, last), command="sft", device="cpu", world_size=2, **more)


def steps(sink: Any, numbers: range) -> None:
    """Steps with two products and one read each."""
    timer = PhaseTimer()
    for step in numbers:
        with timer.phase(Phase.TRAIN):
            x = torch.ones(30, 30)
            ((x @ x) @ x).sum().item()
        sink.step({"step": step, **timer.step(num_samples=1, num_tokens=1)})


def recording() -> bool:
    return torch.autograd._profiler_enabled()


def test_the_steps_that_are_asked_for_are_recorded_and_no_other(tmp_path: Path) -> None:
    sink = sink_of(3, 4)
    sink.start(RunInfo("run", tmp_path))
    steps(sink, range(1, 2))
    assert not recording()
    steps(sink, range(2, 4))
    assert recording()
    sink.evaluation({"step": 3})
    steps(sink, range(4, 7))
    sink.finish({"outcome": "finished"})
    assert not recording()
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "steps_3-4"
    record = json.loads((folder / "summary.json").read_text())
    products = [row for row in record["operations"] if row["name"] == "aten::mm"]
    assert [(row["phase"], row["calls"]) for row in products] == [("train", 2.0)]
    assert (record["steps"], record["num_steps"], record["world_size"]) == ([3, 4], 2, 2)
    assert record["host_reads"]["a_step"] == 1.0
    assert record["host_reads"]["places"][0]["code"].endswith(".sum().item()")
    assert record["seconds_a_step_before"] > 0
    assert record["gpu"] is None
    events = json.loads(gzip.decompress((folder / record["trace"]).read_bytes()))["traceEvents"]
    assert sum(event["name"] == "phase train" and event["ph"] == "X" for event in events) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.trace.json.gz", "summary.json", "summary.md"]
    assert "| train |" in (folder / "summary.md").read_text()


def test_a_run_that_ends_earlier_has_a_profile_of_what_there_was(tmp_path: Path) -> None:
    sink = sink_of(1, 9)
    sink.start(RunInfo("run", tmp_path))
    assert recording(), "the first step is recorded from its beginning"
    steps(sink, range(1, 3))
    sink.finish({"outcome": "interrupted"})
    assert not recording()
    record = json.loads((tmp_path / "profile" / "steps_1-2" / "summary.json").read_text())
    assert (record["num_steps"], record["seconds_a_step_before"]) == (2, None)


def test_a_run_that_fails_within_its_first_profiled_step_leaves_nothing_on(tmp_path: Path) -> None:
    sink = sink_of(2, 3)
    sink.start(RunInfo("run", tmp_path))
    steps(sink, range(1, 2))
    sink.finish({"outcome": "interrupted"})
    assert not recording()
    assert "item" not in vars(torch.Tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_no_profiled_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = sink_of(9, 9)
    sink.start(RunInfo("run", tmp_path))
    steps(sink, range(1, 3))
    sink.finish({"outcome": "finished"})
    assert "nothing was profiled: the run ended with step 2, before step 9" in caplog.text
    assert "--profile 2" in caplog.text
    caplog.clear()
    sink_of(2, 3).start(RunInfo("run", tmp_path, resumed_from_step=10))
    assert "--profile 11-12" in caplog.text
    caplog.clear()
    (tmp_path / "profile").mkdir()
    sink_of(2, 3).start(RunInfo("run", tmp_path, resumed_from_step=10))
    assert caplog.text == "", "these steps were recorded before"


def test_the_start_of_the_profiler_is_no_part_of_a_step(tmp_path: Path) -> None:
    times = iter([100.0, 107.0])
    sink = sink_of(2, 2, clock=lambda: next(times))
    sink.start(RunInfo("run", tmp_path))
    sink.step({"step": 1, "time/step": 1.0})
    sink.step({"step": 2, "time/step": 9.0, "time/train": 1.5, "time/other": 7.5})
    record = json.loads((tmp_path / "profile" / "steps_2-2" / "summary.json").read_text())
    assert record["seconds_a_step"] == 2.0
    assert {row["name"]: row["seconds"] for row in record["phases"]} == {"train": 1.5, "other": 0.5}


def test_settings_ask_for_it_and_a_full_disk_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OptionalFiles()
    place = ("sft", "cpu", 1)
    (idle,) = requested_profile(RunSettings(), files, {}, *place)
    idle.start(RunInfo("run", tmp_path))
    steps(idle, range(1, 5))
    assert not recording()
    (sink,) = requested_profile(RunSettings(profile="1"), files, {}, *place)
    sink.start(RunInfo("run", tmp_path))

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refused)
        steps(sink, range(1, 2))
    assert files.lost == {"profile/": 1}
    assert not recording()
    sink.finish({"outcome": "finished"})


def test_steps_are_recorded_that_somebody_asks_for_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = sink_of(9, 9)
    sink.start(RunInfo("run", tmp_path))
    steps(sink, range(1, 4))
    request = ask(tmp_path, 2)
    steps(sink, range(4, 5))
    assert recording()
    assert not request.exists()
    steps(sink, range(5, 8))
    ask(tmp_path, 2)  # of steps 8 and 9, where 9 is that of the settings: it waits until that has been recorded
    steps(sink, range(8, 13))
    ask(tmp_path, 1)
    sink.finish({"outcome": "interrupted"})
    assert not recording()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["steps_10-11", "steps_5-6", "steps_9-9"]
    record = json.loads((tmp_path / "profile" / "steps_10-11" / "summary.json").read_text())
    assert (record["num_steps"], record["host_reads"]["a_step"]) == (2, 1.0)


def test_a_request_of_an_earlier_process_is_forgotten(tmp_path: Path) -> None:
    ask(tmp_path, 2)
    sink = ProfileSink(None, command="sft", device="cpu", world_size=1)
    sink.start(RunInfo("run", tmp_path))
    steps(sink, range(1, 3))
    assert not recording()


def test_reads_are_not_counted_beside_compiled_layers_on_a_cpu(tmp_path: Path) -> None:
    place = ("sft", "cpu", 1)
    (sink,) = requested_profile(RunSettings(profile="1"), OptionalFiles(), {"compile": "on"}, *place)
    sink.start(RunInfo("run", tmp_path))
    assert "item" not in vars(torch.Tensor)
    steps(sink, range(1, 2))
    reads = json.loads((tmp_path / "profile" / "steps_1-1" / "summary.json").read_text())["host_reads"]
    assert (reads["a_step"], reads["places"]) == (None, [])
    assert "They were not counted" in (tmp_path / "profile" / "steps_1-1" / "summary.md").read_text()
