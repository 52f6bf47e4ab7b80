"""Sink whose files a run can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rft_core.secrets import scrub
from rft_trainer.metrics.sink import RunInfo, Sink
from rft_trainer.runs.optional_files import OptionalFiles


class OptionalSink:
    """Sink around a tracker: what the system refuses to write is counted, and ends no run.

    A tracker that cannot begin is an error as any other: nothing is trained yet. Of the settings it gets none that
    looks like a key or a password.
    """

    def __init__(self, sink: Sink, name: str, files: OptionalFiles) -> None:
        self._sink, self._name, self._files = sink, name, files

    def start(self, info: RunInfo) -> None:
        config = cast("dict[str, Any]", scrub(dict(info.config)))
        self._sink.start(replace(info, config=config))

    def step(self, record: Mapping[str, Any]) -> None:
        with self._files.tried(self._name):
            self._sink.step(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        with self._files.tried(self._name):
            self._sink.evaluation(record)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._files.tried(self._name):
            self._sink.samples(step, rows)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self._files.tried(self._name):
            self._sink.finish(summary)
