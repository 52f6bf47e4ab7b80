"""A tracker that the disk refuses: the run goes on, and its rows are counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.sinks.optional import OptionalSink


class Tracker:
    """Refuses rows while `full`."""

    def __init__(self) -> None:
        self.full = False
        self.rows: list[Any] = []

    def start(self, info: RunInfo) -> None:
        self.step(info)

    def step(self, record: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rows.append(record)

    evaluation = finish = step


def test_rows_that_are_refused_are_counted_and_later_ones_come_again(tmp_path: Path) -> None:
    tracker, files = Tracker(), OptionalFiles()
    sink = OptionalSink(tracker, "TensorBoard", files)
    sink.start(RunInfo("run", tmp_path))
    tracker.full = True
    for step in (1, 2):
        sink.step({"step": step})
    sink.evaluation({"step": 2})
    tracker.full = False
    sink.step({"step": 3})
    tracker.full = True
    sink.finish({})
    assert tracker.rows[1:] == [{"step": 3}]
    assert files.lost == {"TensorBoard": 4}


def test_a_tracker_that_cannot_begin_is_an_error(tmp_path: Path) -> None:
    tracker = Tracker()
    tracker.full = True
    with pytest.raises(OSError, match="No space"):
        OptionalSink(tracker, "TensorBoard", OptionalFiles()).start(RunInfo("run", tmp_path))


def test_what_is_no_refusal_of_the_system_is_raised() -> None:
    def fail(record: Any) -> None:
        raise KeyError("a defect")

    tracker: Any = SimpleNamespace(step=fail)
    files = OptionalFiles()
    with pytest.raises(KeyError):
        OptionalSink(tracker, "TensorBoard", files).step({"step": 1})
    assert not files.lost
