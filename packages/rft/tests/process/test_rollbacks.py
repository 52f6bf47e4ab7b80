"""Repetition of a run in its process: from the checkpoint, with the memory of the attempt before it free."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rft.process.rollbacks import going_back, with_rollbacks
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.rollback import Rollback, RollbackRequested
from rft_trainer.update.numeric_guard import Diagnosis, NumericGuard, RowFault, RowsBeyondBudgetError


def a_step_with_bad_rows() -> None:
    guard = NumericGuard(max_rows=1)
    guard.decide(Diagnosis((RowFault(("x", "y"), "loss", 0),)), math.nan, num_units=9, attempt=0, where="update 3")


def run_at(path: Path, *, is_first: bool = True) -> tuple[Any, Any]:
    started = SimpleNamespace(machine=SimpleNamespace(is_first=is_first), directory=RunDirectory(path))
    return SimpleNamespace(progress=Progress(step=2), saver=SimpleNamespace(saved_step=1)), started


def test_each_attempt_gets_the_rollback_of_the_one_before_and_finds_its_models_gone(tmp_path: Path) -> None:
    asked: list[Rollback | None] = []
    models: list[weakref.ref[nn.Module]] = []

    def attempt(rollback: Rollback | None) -> str:
        assert [model() for model in models] == [None] * len(models)
        asked.append(rollback)
        model = nn.Linear(2, 2)
        models.append(weakref.ref(model))
        if len(asked) == 3:
            return "ended"
        training, started = run_at(tmp_path)
        training.model = training.itself = model  # a cycle, as a loop and its parts are
        model.training_loop = training
        with going_back(training, started, 3):
            a_step_with_bad_rows()
        raise AssertionError("the step did not fail")

    assert with_rollbacks(attempt) == "ended"
    once = Rollback(tmp_path, "policy", {"x": "loss", "y": "loss"}, 3)
    assert asked == [None, once, once]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_records_a_rollback(tmp_path: Path, is_first: bool) -> None:
    training, started = run_at(tmp_path, is_first=is_first)
    with pytest.raises(RollbackRequested), going_back(training, started, 3):
        a_step_with_bad_rows()
    assert started.directory.numerics_file.exists() == is_first


def test_another_error_and_a_rollback_that_is_not_granted_end_the_run(tmp_path: Path) -> None:
    training, started = run_at(tmp_path)
    with pytest.raises(RowsBeyondBudgetError), going_back(training, started, 0):
        a_step_with_bad_rows()
    with pytest.raises(ZeroDivisionError), going_back(training, started, 0):
        raise ZeroDivisionError
