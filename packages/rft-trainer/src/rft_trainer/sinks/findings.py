"""Sink that says once what has been wrong for many steps, and what bounds their speed, while the run goes on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs import bottleneck
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.verdict import RunFinding, constant_reward, present_findings

_LOG = logging.getLogger(__name__)
STEPS = 20
"""Last steps that are looked at, all of which must be there."""
CONSTANT_STEPS, CONSTANT_RESPONSES = 3, 1000
"""Steps and responses from which on a reward that was never another one is said at once: mostly a fault of the reward,
and twenty steps of a large model take an hour."""


class FindingSink:
    """Sink that looks at the last steps after each one, warns of each finding once and tells once what bounds them."""

    def __init__(self, run: RunDirectory, command: str = "") -> None:
        """Look at a run that `command` made."""
        self._run = run
        self._command = command
        self._timed: list[Mapping[str, Any]] | None = []
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self._said: set[str] = set()

    def start(self, info: RunInfo) -> None:
        """Take the last rows of a run that continues."""
        rows = self._run.read_metrics().rows
        self._rows.extend(rows[-STEPS:])
        # what a run that continues has said already it does not say again
        self._timed = list(rows) if len(rows) < bottleneck.STEPS else None

    def step(self, record: Mapping[str, Any]) -> None:
        """Warn of what has become true of the last steps."""
        self._rows.append(record)
        kept = self._run.rollout_steps()
        rows, rollouts = list(self._rows), str(self._run.rollout_file(kept[-1])) if kept else ""
        found = present_findings(rows, rollouts) if len(rows) == STEPS else self._early(rows, rollouts)
        for finding in found:
            if finding.code not in self._said:
                self._said.add(finding.code)
                _LOG.warning("step %d: %s\n        do  %s", record["step"], finding.what, finding.do)
        self._speed(record)

    def _speed(self, record: Mapping[str, Any]) -> None:
        """Say once what bounds the speed, as soon as enough steps are done."""
        if self._timed is None:
            return
        self._timed.append(record)
        bound = bottleneck.speed_verdict(self._timed, self._command)
        if bound is not None:
            self._timed = None
            _LOG.info("speed: %s\n        do  %s", bound.what, bound.do)

    @staticmethod
    def _early(rows: list[Mapping[str, Any]], rollouts: str) -> list[RunFinding]:
        """Return what few steps with many responses show: a reward that is one and the same."""
        responses = sum(row.get("data/samples") or 0 for row in rows)
        if len(rows) < CONSTANT_STEPS or responses < CONSTANT_RESPONSES:
            return []
        finding = constant_reward(rows, rollouts)
        return [] if finding is None else [finding]

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Do nothing: rows of training alone are looked at."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the verdict on the whole run stands in the summary."""
