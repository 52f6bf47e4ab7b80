"""Sink of records to Trackio, a local tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, sample_table, scalars
from rft_trainer.sinks.extras import import_extra


class TrackioSink:
    """Sink to one Trackio run of a project; a resumed run continues under its name."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._trackio = import_extra("trackio", extra="trackio", flag="--use_trackio")

    def start(self, info: RunInfo) -> None:
        self._trackio.init(project=self._project, name=info.name, config=dict(info.config), resume="allow")

    def step(self, record: Mapping[str, Any]) -> None:
        self._trackio.log(scalars(record), step=record["step"])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._trackio.log(evaluation_scalars(record), step=record["step"])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = sample_table(rows)
        self._trackio.log({"samples": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._trackio.finish()
