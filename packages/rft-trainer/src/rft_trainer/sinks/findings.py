"""Sink that says once what has been wrong for many steps, while the run goes on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.verdict import present_findings

_LOG = logging.getLogger(__name__)
STEPS = 20
"""Last steps that are looked at, all of which must be there."""


class FindingSink:
    """Sink that looks at the last steps after each one, and warns of each kind of finding once."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=STEPS)
        self._said: set[str] = set()

    def start(self, info: RunInfo) -> None:
        """Take the last rows of a run that continues."""
        self._rows.extend(self._run.read_metrics().rows[-STEPS:])

    def step(self, record: Mapping[str, Any]) -> None:
        """Warn of what has become true of the last steps."""
        self._rows.append(record)
        if len(self._rows) < STEPS:
            return
        kept = self._run.rollout_steps()
        for finding in present_findings(list(self._rows), str(self._run.rollout_file(kept[-1])) if kept else ""):
            if finding.code not in self._said:
                self._said.add(finding.code)
                _LOG.warning("step %d: %s\n        do  %s", record["step"], finding.what, finding.do)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Do nothing: rows of training alone are looked at."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the verdict on the whole run stands in the summary."""
