"""A run on rows: it reads, shows its plan and begins in one order, and again after each rollback."""

from __future__ import annotations

from typing import Any

import pytest

from rft.stages.supervised import row_training
from rft.stages.supervised.row_training import ReadRun, train_on_rows
from rft_trainer.runs.rollback import RollbackRequested


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_reads_its_data_shows_its_plan_and_begins_in_this_order(calls: Any, is_first: bool) -> None:
    machine = calls.double("machine", is_first=is_first)
    calls.put(
        row_training,
        StopSignals=calls.double("signals"),
        open_machine=machine,
        requested_run="request",
        start="started",
        execute="ended",
    )
    resolved = calls.double("resolved")
    # what is recorded has names with commits, what is read has directories
    local = calls.double("local", settings=calls.double("settings"))
    at = calls.double("at", resolved=calls.double("fixed"))
    calls.put(row_training, continuation=calls.double("begun"), with_commits=at, with_local_models=local)
    calls.put(row_training, compared_facts="facts")
    front = calls.double("front")
    stage = calls.double("stage")

    def read(given: Any) -> ReadRun:
        stage.read(given)
        return ReadRun("data", 7, {"of": "contents"}, lambda started: stage.build(started))  # type: ignore[dict-item]

    assert train_on_rows(read, resolved, ["rft-train"], in_place=None, front=front) == "ended"
    assert calls.taken() == [
        "continuation(resolved, None)",
        "with_commits(begun)",
        "with_local_models(fixed)",
        "requested_run(local, None)",
        "StopSignals()",
        "signals begins",
        "open_machine(settings.model.device, 'request', settings.watch, command=['rft-train'], "
        "debug=settings.run.debug, show_error=front.show_error)",
        "machine begins",
        "stage.read(local)",
        "compared_facts(at, machine, {'of': 'contents'})",
        *(["front.show_plan(local, 'data', machine)"] if is_first else []),
        "start(at, ['rft-train'], machine, 7, 'facts', front=front, in_place=None)",
        "stage.build('started')",
        "execute(stage.build(), 'started', signals, None)",
        "machine ends",
        "signals ends",
    ]
    train_on_rows(read, resolved, [], in_place=calls.double("place"), front=front)
    assert [call for call in calls.taken() if "place" in call] == [
        "continuation(resolved, place)",
        "requested_run(local, place)",
        "start(at, [], machine, 7, 'facts', front=front, in_place=place)",
    ]
    rollback = calls.double("rollback", run="directory", failed_step=3)

    def execute(training: Any, started: Any, signals: Any, now: Any) -> str:
        if now is None:
            raise RollbackRequested(rollback)
        assert now is rollback
        return "ended after it"

    calls.replace(row_training, execute=execute)
    assert train_on_rows(read, resolved, [], front=front) == "ended after it"
    made = calls.taken()
    assert made[made.index("continuation(fixed, 'directory')") + 1 :] == [
        "start(begun, [], machine, 7, 'facts', front=front, in_place='directory')",
        "stage.build('started')",
        "machine ends",
        "signals ends",
    ]


def test_what_fits_the_machine_is_what_is_read_and_what_is_recorded(calls: Any) -> None:
    calls.put(row_training, StopSignals=calls.double("signals"), open_machine=calls.double("machine", is_first=False))
    calls.put(row_training, requested_run="request", start="started", execute="ended", compared_facts="facts")
    local = calls.double("local", settings=calls.double("settings"))
    at = calls.double("at", resolved=calls.double("fixed"))
    calls.put(row_training, continuation=calls.double("begun"), with_commits=at, with_local_models=local)
    calls.put(row_training, with_choices="choices", replace=calls.double("at_fitted"))
    fitted, read = calls.double("fitted"), list[Any]()

    def take(given: Any) -> ReadRun:
        read.append(given)
        return ReadRun("data", 7, {}, lambda started: calls.double("loop"))  # type: ignore[arg-type, return-value]

    train_on_rows(take, calls.double("resolved"), [], fit=lambda given, machine: fitted)
    made = calls.taken()
    assert read == [fitted]
    assert "with_choices(fixed, local, fitted)" in made
    assert "replace(at, resolved='choices')" in made
    assert any(call.startswith("start(at_fitted, ") for call in made)
