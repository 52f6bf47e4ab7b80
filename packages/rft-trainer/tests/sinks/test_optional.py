"""A tracker that the disk refuses: the run goes on, and its rows are counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_trainer.metrics.sink import RunInfo, sample_table
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

    def samples(self, step: int, rows: Any) -> None:
        self.step((step, rows))


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


def test_samples_that_are_refused_are_counted() -> None:
    tracker, files = Tracker(), OptionalFiles()
    sink, rows = OptionalSink(tracker, "TensorBoard", files), [{"response": "2"}]
    sink.samples(3, rows)
    tracker.full = True
    sink.samples(4, rows)
    assert tracker.rows == [(3, rows)]
    assert files.lost == {"TensorBoard": 1}


def test_a_table_of_samples_has_a_type_for_each_column() -> None:
    columns, cells = sample_table(
        [{"response": "2", "label": {"all": ["2"]}, "reward": 1, "num_tokens": 3}, {"response": "", "reward": None}]
    )
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    assert rows[0]["label"] == '{"all": ["2"]}'
    assert (rows[0]["reward"], type(rows[0]["reward"]), rows[0]["num_tokens"]) == (1.0, float, 3)
    assert (rows[1]["response"], rows[1]["reward"], rows[1]["prompt"]) == ("", None, None)


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


def test_no_secret_of_the_settings_is_sent_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "word-of-the-environment")
    planted = {
        "remote_rm_url": "http://user:hunter22@rm:9000/score?token=abcdefgh",
        "pretrain": "models/word-of-the-environment",
        "judge": {"api_key": "plain-value", "headers": ["Authorization: Bearer abcdefgh1234"]},
        "notes": "hf_" + "a" * 20 + " sk-" + "b" * 20 + " ghp_" + "c" * 20 + " AKIA" + "D" * 16,
    }
    kept = {"input_key": "question", "label_key": "answer", "actor_learning_rate": 1e-6, "n_samples_per_prompt": 8}
    tracker = Tracker()
    OptionalSink(tracker, "TensorBoard", OptionalFiles()).start(RunInfo("run", tmp_path, {**planted, **kept}))
    sent = tracker.rows[0].config
    assert {name: sent[name] for name in kept} == kept
    shown = repr(sent)
    for secret in ("hunter22", "abcdefgh", "word-of", "plain-value", "hf_a", "sk-b", "ghp_c", "AKIAD"):
        assert secret not in shown
