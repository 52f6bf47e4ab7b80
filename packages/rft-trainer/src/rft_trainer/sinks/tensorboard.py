"""Sink of records to TensorBoard event files."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_trainer.metrics.sink import RunInfo, evaluation_scalars, sample_table, scalars
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

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text("samples", _markdown(*sample_table(rows)), step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # at every step: a kill loses what is only buffered
        self._writer.flush()


def _markdown(columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """Return a table of Markdown in which what the policy wrote is text and no markup."""
    lines = [list(columns), ["---"] * len(columns), *([_quoted(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _quoted(cell: Any) -> str:
    if not isinstance(cell, str):
        return "" if cell is None else f"{cell:g}"
    # a line's end would end the row of the table
    escaped = html.escape(cell).replace("\n", "<br>")
    return re.sub(r"[|*_`\[\]\\#~]", lambda found: f"&#{ord(found[0])};", escaped)
