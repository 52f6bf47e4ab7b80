"""What is said while a run goes on: once, and only of steps that are all there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rft_trainer.health.history import FINDING_STEPS as STEPS
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.settings.run import OnAlarm
from rft_trainer.sinks.findings import FindingSink


def row(step: int, reward: float = 0.0) -> dict[str, float]:
    signal = 0.5 if reward else 0.0
    return {
        "step": step,
        "reward/mean": reward,
        "reward/min": 0.0,
        "reward/max": 1.0 if reward else 0.0,
        "reward/groups_with_signal": signal,
        "policy/gradient_norm": signal,
        "policy/updates": 1,
        "data/samples": 8,
        "data/prompts": 2,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config_text="seed: 1\n", command=["rft-train"], environment={})


def test_what_has_been_wrong_for_many_steps_is_said_once(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    run.write_rollouts(10, [{"reward": 0.0}])
    sink = FindingSink(run)
    sink.start(RunInfo("run", run.path))
    said: list[int] = []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 3 * STEPS):
            sink.step(row(step))
            said.append(len(caplog.records))
    assert said == [0] * (STEPS - 1) + [1] * (2 * STEPS)
    assert "reward was 0" in caplog.text
    assert "step_000010.jsonl" in caplog.text


def test_nothing_is_said_of_a_reward_that_comes_in_time(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    sink = FindingSink(run)
    sink.start(RunInfo("run", run.path))
    for step in range(1, 3 * STEPS):
        sink.step(row(step, 0.1 if step % 5 == 0 else 0.0))
    assert not caplog.records


@pytest.mark.parametrize(("samples", "expected"), [(512, 3), (200, 5), (8, STEPS)])
def test_a_constant_reward_of_many_responses_is_said_after_few_steps_and_once(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, samples: int, expected: int
) -> None:
    sink = FindingSink(run)
    sink.start(RunInfo("run", run.path))
    said: list[int] = []
    for step in range(1, STEPS + 5):
        sink.step({**row(step), "data/samples": samples})
        said.append(len(caplog.records))
    assert said == [0] * (expected - 1) + [1] * (STEPS + 5 - expected)
    assert f"of steps 1 to {expected}" in caplog.text


def test_one_other_reward_among_many_responses_is_no_constant(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FindingSink(run)
    sink.start(RunInfo("run", run.path))
    for step in range(1, 6):
        sink.step({**row(step), "reward/max": float(step == 1), "data/samples": 512})
    assert not caplog.records


def test_a_run_that_continues_counts_its_earlier_steps(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, STEPS):
        run.append_metrics(row(step))
    sink = FindingSink(run)
    sink.start(RunInfo("run", run.path, resumed_from_step=STEPS - 1))
    sink.evaluation({"step": STEPS - 1})
    assert not caplog.records
    sink.step(row(STEPS))
    assert len(caplog.records) == 1
    sink.finish({})


def test_what_bounds_the_speed_is_said_once_and_not_again_by_a_run_that_continues(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    timed = [{**row(step, 0.1), "time/step": 1.0, "time/data": 0.5, "time/train": 0.5} for step in range(1, 81)]
    with caplog.at_level(logging.INFO):
        sink = FindingSink(run, "sft")
        sink.start(RunInfo("run", run.path))
        for record in timed[:40]:
            sink.step(record)
            run.append_metrics(record)
        assert [record.getMessage().split("\n")[0] for record in caplog.records] == [
            "speed: the steps waited for their rows in 50% of their time"
        ]
        again = FindingSink(run, "sft")
        again.start(RunInfo("run", run.path))
        for record in timed[40:]:
            again.step(record)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("on_alarm", "pauses"), [("log", None), ("pause", True), ("stop", False)])
def test_the_first_alarm_asks_the_loop_to_end_as_it_was_told(
    run: RunDirectory, caplog: pytest.LogCaptureFixture, on_alarm: OnAlarm, pauses: bool | None
) -> None:
    with StopSignals() as signals:
        sink = FindingSink(run, "rl", on_alarm)
        sink.start(RunInfo("run", run.path))
        for step in range(1, 12):
            sink.step({"step": step, "completion/truncated_share": 1.0, "policy/kl": 0.5})
            assert (signals.alarm is not None) == (step >= 5 and pauses is not None)
    # the warnings before and after it end nothing
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == [
        "policy_drift",
        "never_ends",
        "truncation",
    ]
    if signals.alarm is not None:
        assert signals.alarm.pauses == pauses
        assert signals.alarm.what.startswith("never_ends: 100% of the responses")


def test_a_run_that_continues_does_not_stop_for_an_alarm_that_it_has_told(run: RunDirectory) -> None:
    for step in range(1, 8):
        run.append_metrics({"step": step, "completion/truncated_share": 1.0})
    with StopSignals() as signals:
        sink = FindingSink(run, "rl", "stop")
        sink.start(RunInfo("run", run.path, resumed_from_step=7))
        sink.step({"step": 8, "completion/truncated_share": 1.0})
    assert signals.alarm is None
