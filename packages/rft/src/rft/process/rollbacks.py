"""Repetition of a run in its process: it is built anew from its last checkpoint where it goes back to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from rft.process.machine import Machine
from rft_trainer.runs.checkpointing import Progress, Saver
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.rollback import Rollback, RollbackRequested, request_rollback
from rft_trainer.update.numeric_guard import RowsBeyondBudgetError

ResultT = TypeVar("ResultT")


class RepeatedLoop(Protocol):
    """The training loop, as far as a rollback needs it."""

    @property
    def progress(self) -> Progress: ...
    @property
    def saver(self) -> Saver: ...


class RepeatedRun(Protocol):
    """The run, as far as a rollback needs it."""

    @property
    def machine(self) -> Machine: ...
    @property
    def directory(self) -> RunDirectory: ...


@contextmanager
def going_back(training: RepeatedLoop, started: RepeatedRun, limit: int) -> Generator[None]:
    """Request a rollback, at most `limit` of them, where a step has more rows at fault than may be set aside.

    Raises:
        RollbackRequested: the run can go back to its last checkpoint.
        RowsBeyondBudgetError: it cannot.
    """
    try:
        yield
    except RowsBeyondBudgetError as error:
        raise request_rollback(
            error,
            training.progress,
            training.saver.saved_step,
            started.directory,
            limit=limit,
            records=started.machine.is_first,
        ) from error


def with_rollbacks(attempt: Callable[[Rollback | None], ResultT]) -> ResultT:
    """Build and train by `attempt` until it ends by itself.

    `attempt` gets None at first, and then the rollback that the one before asked for: it goes on from the checkpoint.
    """
    rollback: Rollback | None = None
    while True:
        try:
            return attempt(rollback)
        except RollbackRequested as requested:
            rollback = requested.rollback
        # outside the handler: until it is left, the error holds the models of the last attempt
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
