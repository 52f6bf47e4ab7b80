"""Callbacks of a run: functions of the program that are called after every step and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

from rft.library.run import Run
from rft_trainer.metrics.sink import RunInfo
from rft_trainer.runs.stop_signals import BY_PROGRAM, in_force


class _Stop(Enum):
    """The one value of its kind, so that no other return value stops a run."""

    STOP = "stop"


STOP: Final = _Stop.STOP
"""The answer of a callback that ends the run after this step: it is saved, and can be resumed."""
StopOrNone: TypeAlias = _Stop | None


class Callback:
    """Code of a program along a run, called on the first rank alone, between steps: override what is needed.

    Example::

        class StopWhenSolved(rft.Callback):
            def on_evaluation(self, run, step, metrics):
                return rft.STOP if metrics["eval/accuracy"] > 0.95 else None
    """

    def on_begin(self, run: Run) -> None:
        """The run directory exists; nothing is trained yet."""

    def on_step(self, run: Run, step: int, metrics: Mapping[str, Any]) -> StopOrNone:
        """A step ended; `metrics` is its row of metrics.jsonl. Returns `rft.STOP` to save and end the run."""

    def on_evaluation(self, run: Run, step: int, metrics: Mapping[str, Any]) -> StopOrNone:
        """The held-out rows were scored; `metrics` is the row of evals.jsonl."""

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run ended, however it did; `summary` is the content of summary.json."""


class CallbackSink:
    """The callbacks of a run as a sink."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._run: Run | None = None

    def start(self, info: RunInfo) -> None:
        """Call `on_begin` of every callback."""
        self._run = Run(info.directory)
        for callback in self._callbacks:
            callback.on_begin(self._run)

    def step(self, record: Mapping[str, Any]) -> None:
        """Call `on_step` of every callback."""
        for callback in self._callbacks:
            self._stop_if(callback.on_step(self._started, int(record["step"]), record))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: callbacks get records of steps and evaluations."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Call `on_evaluation` of every callback."""
        for callback in self._callbacks:
            self._stop_if(callback.on_evaluation(self._started, int(record["step"]), record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Call `on_end` of every callback."""
        for callback in self._callbacks:
            callback.on_end(self._started, summary)

    @property
    def _started(self) -> Run:
        assert self._run is not None
        return self._run

    def _stop_if(self, answer: object) -> None:
        # as a signal would ask for it: the loop saves where stopping loses nothing, and all ranks agree
        if answer is STOP:
            signals = in_force()
            signals.received = signals.received or BY_PROGRAM
