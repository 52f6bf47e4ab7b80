"""Return to the last checkpoint: which rows it leaves out, how often it is granted, and what is recorded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rft_core.durable_files import read_records
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.rollback import Rollback, RollbackRequested, request_rollback
from rft_trainer.update.numeric_guard import Diagnosis, NumericGuard, RowFault, RowsBeyondBudgetError

FAULTS = (RowFault(("a", "b"), "loss", 1), RowFault(("c",), "output of head", 0))


def beyond() -> RowsBeyondBudgetError:
    guard = NumericGuard(part="critic", max_rows=1, resume_command="resume here")
    with pytest.raises(RowsBeyondBudgetError) as caught:
        guard.decide(Diagnosis(FAULTS), math.nan, num_units=9, attempt=0, where="update 7")
    return caught.value


def request(directory: RunDirectory, progress: Progress, limit: int = 2, saved: int | None = 4) -> RollbackRequested:
    return request_rollback(beyond(), progress, saved, directory, limit=limit, records=True)


def test_the_rows_at_fault_are_left_out_of_the_model_whose_step_failed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    rollback = request(directory, Progress(step=6)).rollback
    assert rollback == Rollback(tmp_path, "critic", {"a": "loss", "b": "loss", "c": "output of head"}, 7)
    guards = {"policy": NumericGuard(), "critic": NumericGuard(left_out={"old": "loss"})}
    restored = Progress(step=4, guards=guards)
    rollback.apply(restored)
    assert list(guards["critic"].left_out) == ["old", "a", "b", "c"]
    assert guards["policy"].left_out == {}
    assert restored.rollbacks == [7]


def test_what_happened_is_recorded_at_the_step_of_the_checkpoint_and_stays_when_later_rows_are_cut(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.append_numerics({"step": 7, "where": "update 7"})
    request(directory, Progress(step=6, rollbacks=[5]))
    directory.cut_after(4)
    [row] = read_records(directory.numerics_file).rows
    assert (row["step"], row["where"], row["part"]) == (4, "step 7", "critic")
    assert [fault["samples"] for fault in row["faults"]] == [["a", "b"], ["c"]]
    assert "rollback 2 of 2" in row["what"]


@pytest.mark.parametrize(
    ("progress", "limit", "saved"),
    [
        (Progress(step=6), 0, 4),
        (Progress(step=6, rollbacks=[3, 5]), 2, 4),
        (Progress(step=6, rollbacks=[7]), 2, 4),
        (Progress(step=6), 2, None),
    ],
)
def test_a_run_that_has_gone_back_often_enough_or_came_no_further_ends_with_the_rows(
    tmp_path: Path, progress: Progress, limit: int, saved: int | None
) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(RowsBeyondBudgetError) as caught:
        request(directory, progress, limit, saved)
    problem = caught.value.problem
    assert problem.code == "numerics.rows"
    assert problem.do == "look first at these rows, then: resume here --max_rows_set_aside 6"
    assert not directory.numerics_file.exists()
