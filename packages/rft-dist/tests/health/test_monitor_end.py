"""How the monitor of one process ends it: with an error of its own, for another rank, or in order."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monitor_doubles import BROKEN, LATE, NOW, seen, watch

from rft_core.errors import ExitCode, PeerError
from rft_dist.health import monitor
from rft_dist.health.activity import Activity
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import FINISHED, STOPPING
from rft_dist.health.monitor import Watch
from rft_dist.health.process_state import GONE
from rft_dist.health.termination import StoppedByPeer

pytestmark = pytest.mark.usefixtures("clock")


class Ended(BaseException):
    """Stands for the end of the process."""


def ended(made: Watch, cause: Cause, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guard does with a cause, in order."""
    done: list[Any] = []

    def leave(code: int) -> None:
        done.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(monitor, "raise_in_main", lambda kind: done.append(kind))
    monkeypatch.setattr(monitor, "abort_groups", lambda folder, rank: done.append(("abort", folder, rank)))
    monkeypatch.setattr(monitor, "flush", lambda: done.append("flush"))
    monkeypatch.setattr(monitor, "_GRACE_SECONDS", 0.01)
    made.folder.show = lambda error: done.append(error.problem.code)
    with contextlib.suppress(Ended):
        made._end(cause)
    return done


def test_a_main_thread_that_does_not_leave_is_ended_with_the_page_and_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, courier = watch(0, 2)
    (tmp_path / "logs").mkdir()
    made.folder.attach(tmp_path, "rft-train resume run")
    done = ended(made, LATE, monkeypatch)
    assert done == [StoppedByPeer, "peer.late", ("abort", tmp_path, 0), "flush", int(ExitCode.PEER)]
    assert made.cause == LATE
    assert made._ended == STOPPING
    assert [word for word in courier.asked if word != "read"] == ["publish", "acknowledge", "count"]
    assert json.loads((tmp_path / "error.json").read_text())["what"] == LATE.what
    assert "node1" in (tmp_path / "logs/stopped.txt").read_text()


def test_inside_a_collective_nothing_is_raised_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity(clock=lambda: NOW)
    entered = activity.enter("sum", (3,), "float32")
    made, courier = watch(0, 2, activity=activity)
    courier.in_force = replace(LATE, what="another was first")
    assert ended(made, LATE, monkeypatch)[0] == "peer.late"
    assert made.cause == courier.in_force
    activity.leave(entered)
    assert ended(watch(0, 2, activity=activity)[0], LATE, monkeypatch)[0] is StoppedByPeer


def test_a_main_thread_on_its_way_out_ends_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = watch(0, 2)
    made._leaving.set()
    assert ended(made, LATE, monkeypatch) == []
    assert made.cause == LATE

    leaves, _ = watch(0, 2)
    monkeypatch.setattr(leaves._leaving, "wait", lambda seconds: True)
    assert ended(leaves, LATE, monkeypatch) == [StoppedByPeer]


def test_the_page_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="rft_dist")
    made, courier = watch(0, 2)
    made._tell(LATE)
    made._tell(LATE)
    assert len(caplog.records) == 1
    assert "node1" in caplog.text
    assert not caplog.records[0].getMessage().endswith("\n")
    assert courier.asked == ["read"]
    alone, _ = watch(0, 1)
    alone._courier = None
    alone._tell(LATE)
    assert len(caplog.records) == 2


def test_who_serves_the_store_waits_until_the_others_know(clock: list[float]) -> None:
    made, courier = watch(0, 3)
    courier.acknowledged = 2
    made._linger()
    assert clock[0] - NOW == pytest.approx(3.0, abs=0.11), "the grace period and a beat"
    made._neighbours[2] = (GONE, NOW)
    before = clock[0]
    made._linger()
    assert clock[0] == before, "who is gone is not waited for"
    other, courier = watch(1, 3)
    courier.acknowledged = 0
    other._linger()
    assert clock[0] == before
    assert courier.asked == ["acknowledge"]


def test_a_rank_leaves_in_order_and_who_serves_the_store_leaves_last(clock: list[float]) -> None:
    made, courier = watch(1, 2)
    made.close()
    assert courier.asked == ["announce", "announce", "stop"]
    assert made._guard.asked == ["join"]  # type: ignore[attr-defined]
    assert (made._ended, made._ended_at) == (FINISHED, NOW)
    assert made._stop.is_set()

    first, courier = watch(0, 2)

    def read(seconds: float) -> bool:
        courier.seen[1] = seen(1, ended=FINISHED if clock[0] > NOW + 0.2 else "")
        return True

    courier.read_everyone = read  # type: ignore[method-assign]
    first.close()
    assert clock[0] - NOW == pytest.approx(0.25)


def test_nobody_waits_for_ranks_that_are_gone_nor_for_ever_nor_without_a_store(clock: list[float]) -> None:
    patient, _ = watch(0, 2)
    patient.close()
    assert clock[0] - NOW == pytest.approx(20.0, abs=0.1)
    for change in (
        lambda made, courier: made._neighbours.update({1: (GONE, NOW)}),
        lambda made, courier: setattr(made, "cause", LATE),
        lambda made, courier: setattr(courier, "takes", False),
        lambda made, courier: setattr(made, "_courier", None),
    ):
        made, courier = watch(0, 2)
        change(made, courier)
        before = clock[0]
        made.close()
        assert clock[0] == before
        assert made._stop.is_set()


def test_an_error_of_one_s_own_is_written_published_and_raised_as_it_is(tmp_path: Path) -> None:
    made, courier = watch(1, 2, scrub=lambda text: text.replace("secret", "***"))
    made.folder.attach(tmp_path, "resume")
    assert made.failed(ValueError("a secret")) is None
    assert made.cause is not None
    assert (made.cause.kind, made.cause.rank, made.cause.told_by) == ("failure", 1, 1)
    assert "a ***" in made.cause.what
    assert made.cause.error["phase"] == "start"
    assert json.loads((tmp_path / "error.json").read_text())["error"]["message"] == "a ***"
    assert made._leaving.is_set()
    assert made._ended == STOPPING
    assert courier.asked == ["publish", "acknowledge", "announce", "stop"]


def test_what_the_libraries_have_under_way_is_ended_and_noted_beside_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    made, courier = watch(1, 2)
    made.folder.attach(tmp_path, "resume")
    monkeypatch.setattr(monitor, "abort_groups", lambda folder, rank: done.append((folder, rank, list(courier.asked))))
    made.failed(ValueError("wrong"))
    assert done == [(tmp_path, 1, ["publish"])], "the others know the cause by then"


def test_a_broken_collective_takes_the_cause_that_another_rank_published(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rft_dist")
    made, courier = watch(1, 2)
    made.cause = LATE
    error = made.failed(BROKEN)
    assert error is not None
    assert error.problem.code == "peer.late"
    assert error.problem.what == LATE.what
    assert error.problem.do == made.folder.resume_command
    assert "publish" not in courier.asked
    assert len(caplog.records) == 1
    assert clock[0] == NOW


def test_a_broken_collective_that_nobody_explains_is_published_as_seen(clock: list[float]) -> None:
    made, courier = watch(1, 2)
    made._guard.alive = True  # type: ignore[attr-defined]
    assert made.failed(BROKEN) is None
    assert clock[0] - NOW == pytest.approx(9.0, abs=0.1), "the silence and two beats"
    assert made.cause is not None
    assert made.cause.error["code"] == "collective.failed"
    later, courier = watch(1, 2)
    courier.in_force = LATE
    error = later.failed(BROKEN)
    assert error is not None
    assert error.problem.code == "peer.late"


def test_a_stop_by_the_guard_that_comes_during_the_report_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = watch(1, 2)
    real, calls = made._failed, list[int]()

    def interrupted(error: BaseException) -> PeerError | None:
        calls.append(1)
        if len(calls) == 1:
            raise StoppedByPeer
        return real(error)

    monkeypatch.setattr(made, "_failed", interrupted)
    assert made.failed(ValueError("own")) is None
    assert len(calls) == 2


def test_whose_error_it_is() -> None:
    several, alone = watch(1, 2)[0], watch(0, 1)[0]
    for error, own in ((ValueError("x"), True), (BROKEN, False), (StoppedByPeer(), False)):
        assert several._is_own(error) is own
    assert alone._is_own(BROKEN)
    assert not alone._is_own(StoppedByPeer())
