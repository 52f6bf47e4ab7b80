"""The sink that is always on: metrics.jsonl, evals.jsonl and summary.json of the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.directory import RunDirectory


class JsonlSink:
    """Sink that writes to the run directory, which needs no account and no network."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def start(self, info: RunInfo) -> None:
        """Do nothing: the directory was created, or cut back to the checkpoint, before."""

    def step(self, record: Mapping[str, Any]) -> None:
        self._run.append_metrics(record)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: they are in rollouts/ already."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._run.append_evaluation(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.write_summary(summary)
        self._run.close()
