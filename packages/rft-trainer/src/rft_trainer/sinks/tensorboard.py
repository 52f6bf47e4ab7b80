"""Sink of records to TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, scalars
from rft_trainer.sinks.extras import import_extra


class TensorboardSink:
    """Sink of scalars to event files in `<directory>/<name of the run>`, by default in `tensorboard` of the run itself.

    Files of several runs in one folder would be drawn as one curve.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        import_extra("tensorboard", extra="tensorboard", flag="--use_tensorboard")
        self._writers = import_extra("torch.utils.tensorboard", extra="tensorboard", flag="--use_tensorboard")
        self._directory = directory
        self._writer: Any = None

    def start(self, info: RunInfo) -> None:
        """Open the event file; records of an earlier attempt beyond the resumed step are hidden."""
        purge = None if info.resumed_from_step is None else info.resumed_from_step + 1
        directory = Path(self._directory) / info.name if self._directory else info.directory / "tensorboard"
        self._writer = self._writers.SummaryWriter(log_dir=str(directory), purge_step=purge)

    def step(self, record: Mapping[str, Any]) -> None:
        self._add(scalars(record), record["step"])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._add(evaluation_scalars(record), record["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # at every step: a kill loses what is only buffered
        self._writer.flush()
