"""Sink that says once what has become wrong with a run, and what bounds its speed, while the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.health.watch import Alarm, HealthWatch, replayed
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs import bottleneck
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.stop_signals import AlarmStop, in_force
from rft_trainer.settings.run import OnAlarm

_LOG = logging.getLogger(__name__)


class FindingSink:
    """Sink that applies the detectors to each row, warns of each once, and tells once what bounds the speed."""

    def __init__(
        self,
        run: RunDirectory,
        command: str = "",
        on_alarm: OnAlarm = "log",
        micro_batch: bottleneck.MicroBatch | None = None,
    ) -> None:
        """Look at a run that `command` made, with such micro-batches; an alarm does what `on_alarm` says."""
        self._run = run
        self._command = command
        self._on_alarm: OnAlarm = on_alarm
        self._micro_batch = micro_batch
        self._timed: list[Mapping[str, Any]] | None = []
        self._watch = HealthWatch(command, self._rollouts)

    def start(self, info: RunInfo) -> None:
        """Take the rows of a run that continues: what it has said already it does not say again, nor stops for."""
        del info
        rows = self._run.read_metrics().rows
        self._watch = replayed(HealthWatch(self._command, self._rollouts), rows, self._run.read_evaluations().rows)
        self._timed = list(rows) if len(rows) < bottleneck.STEPS else None

    def step(self, record: Mapping[str, Any]) -> None:
        """Warn of what has become true with this row."""
        for alarm in self._watch.step(record):
            _LOG.warning("step %d: %s: %s\n        do  %s", alarm.step, alarm.name, alarm.what, alarm.do)
            if alarm.level == "alarm":
                self._act(alarm)
        self._speed(record)

    def _act(self, alarm: Alarm) -> None:
        """Ask the loop to end between this step and the next, as a signal does."""
        signals = in_force()
        if self._on_alarm != "log" and signals.alarm is None:
            signals.alarm = AlarmStop(f"{alarm.name}: {alarm.what}", alarm.do, pauses=self._on_alarm == "pause")

    def _rollouts(self) -> str:
        kept = self._run.rollout_steps()
        return str(self._run.rollout_file(kept[-1])) if kept else ""

    def _speed(self, record: Mapping[str, Any]) -> None:
        """Say once what bounds the speed, as soon as enough steps are done."""
        if self._timed is None:
            return
        self._timed.append(record)
        bound = bottleneck.speed_verdict(self._timed, self._command, self._micro_batch)
        if bound is not None:
            self._timed = None
            if any(alarm.name == "data_wait" for alarm in self._watch.alarms):
                return  # a detector has said it with the same words
            _LOG.info("speed: %s\n        do  %s", bound.what, bound.do)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: detectors read metrics alone."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Keep the evaluation, which rewards of training are compared with."""
        self._watch.evaluation(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the alarms of the whole run stand in the summary."""
