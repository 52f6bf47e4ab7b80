"""Return of a run to its last checkpoint, past rows that exceed the budget of rows set aside.

The loop ends, and the run is built again in the same process as a resume would build it: weights, moments, critic,
averages, data position and random keys are those of the checkpoint. The rows are left out from there on, and are part
of the checkpoint, which is saved again with them before anything is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import NumericsError
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.update.numeric_guard import RowsBeyondBudgetError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollback:
    """One return to the last checkpoint, the same on every rank."""

    run: Path
    """Directory of the run."""
    part: str
    """The model whose step failed."""
    rows: Mapping[str, str]
    """Rows to leave out, each with its reason."""
    failed_step: int

    def apply(self, progress: Progress) -> None:
        """Leave the rows out from the restored checkpoint on."""
        progress.guards[self.part].left_out.update(self.rows)
        progress.rollbacks.append(self.failed_step)


class RollbackRequested(Exception):
    """The end of a loop whose run goes on from its last checkpoint; raised on every rank."""

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(f"step {rollback.failed_step} goes back to the last checkpoint")
        self.rollback = rollback


def request_rollback(
    error: RowsBeyondBudgetError,
    progress: Progress,
    saved_step: int | None,
    directory: RunDirectory,
    *,
    limit: int,
    records: bool,
) -> RollbackRequested:
    """Return the request to go back past the rows of `error`, in the state that the failed step left.

    Args:
        error: of the step that failed.
        progress: of the run, before that step.
        saved_step: the last checkpoint.
        directory: of the run.
        limit: how often a run may go back.
        records: whether this rank writes into the directory.

    Raises:
        NumericsError: the run has gone back often enough, or has not come beyond the step that failed before.
    """
    step, number = progress.step + 1, len(progress.rollbacks) + 1
    if number > limit or saved_step is None:
        raise _refused(error, f"the run has gone back {len(progress.rollbacks)} times (--max_rollbacks {limit})")
    if progress.rollbacks and step <= progress.rollbacks[-1]:
        raise _refused(error, f"the run went back from step {progress.rollbacks[-1]} and has not come beyond it")
    rows = {name: fault.stage for fault in error.faults for name in fault.sample_ids}
    what = (
        f"{error.problem.what}: back to the checkpoint of step {saved_step}, and from there on without "
        f"{', '.join([*rows][:3])}{', ...' if len(rows) > 3 else ''} (rollback {number} of {limit})"
    )
    _LOG.warning("step %d of the %s: %s", step, error.part, what)
    if records:
        faults = [{"samples": list(one.sample_ids), "stage": one.stage, "rank": one.rank} for one in error.faults]
        # as a row of the checkpoint's step: the rows after it are removed
        row = {"step": saved_step, "where": f"step {step}", "part": error.part, "what": what, "faults": faults}
        directory.append_numerics(row)
    return RollbackRequested(Rollback(directory.path, error.part, rows, step))


def _refused(error: RowsBeyondBudgetError, why: str) -> NumericsError:
    problem = error.problem
    return RowsBeyondBudgetError(
        code=problem.code,
        what=problem.what,
        where=problem.where,
        why=problem.why,
        state=f"{problem.state}; {why}",
        do=problem.do,
    )
