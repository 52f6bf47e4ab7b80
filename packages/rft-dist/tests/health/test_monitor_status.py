"""What the monitor of one process says of it, what it logs, and how it starts and looks on."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from monitor_doubles import LATE, NOW, SETTINGS, call, seen, watch

from rft_dist.health import monitor
from rft_dist.health.activity import Activity
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import Status
from rft_dist.health.monitor import Watch
from rft_dist.health.process_state import this_machine

pytestmark = pytest.mark.usefixtures("clock")


def test_a_status_says_where_this_rank_is(clock: list[float]) -> None:
    activity = Activity(clock=lambda: clock[0])
    made, _ = watch(3, 4, activity=activity)
    first = made.status()
    assert (first.rank, first.pid, first.machine, first.beat) == (3, os.getpid(), this_machine(), 1)
    assert (first.phase, first.call, first.inside, first.call_seconds, first.ended) == ("start", None, False, 0.0, "")
    activity.follow(lambda: 7)
    activity.end_step()
    clock[0] += 2.0
    activity.enter_phase("train")
    clock[0] += 1.0
    entered = activity.enter("sum", (2,), "float32")
    clock[0] += 0.5
    status = made.status()
    assert (status.beat, status.step, status.steps_done, status.phase) == (2, 7, 1, "train")
    assert (status.phase_seconds, status.call, status.inside) == (1.5, entered, True)
    assert (status.call_seconds, status.idle_seconds) == (0.5, 0.5)
    assert status.stack
    activity.leave(entered)
    clock[0] += 4.0
    assert (made.status().inside, made.status().idle_seconds) == (False, 4.0)


def test_a_collective_of_a_library_is_progress(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    monkeypatch.setattr(monitor, "library_calls", lambda: calls[0])
    made, _ = watch()
    clock[0] += 10.0
    assert (made.status().idle_seconds, made.status().library_calls) == (10.0, 0)
    calls[0] = 3
    assert (made.status().idle_seconds, made.status().library_calls) == (0.0, 3)
    clock[0] += 2.0
    assert made.status().idle_seconds == 2.0


def test_the_start_waits_for_every_rank_and_not_for_ever(clock: list[float]) -> None:
    made, courier = watch(1, 3)
    courier.present, courier.seen = False, {}
    made.start()
    assert courier.asked == ["start", "announce", "read", "read", "read"]
    assert set(courier.seen) == {0, 1, 2}
    assert made._guard.asked == ["start"]  # type: ignore[attr-defined]

    silent, absent = watch(1, 3)
    absent.present = False
    absent.read_everyone = lambda seconds: clock.__setitem__(0, clock[0] + 3.0)  # type: ignore[method-assign,assignment]
    begin = clock[0]
    silent.start()
    assert 5.0 <= clock[0] - begin <= 6.1


def test_a_status_of_another_beat_each_time() -> None:
    made, _ = watch()
    beats = [made.status().beat for _ in range(3)]
    assert beats == [1, 2, 3]
    assert isinstance(made.status(), Status)


def test_what_a_rank_says_of_itself(clock: list[float]) -> None:
    activity = Activity(clock=lambda: clock[0])
    made, _ = watch(1, 2, activity=activity)
    activity.follow(lambda: 4)
    activity.enter_phase("train")
    clock[0] += 3.0
    words = made._own_words()
    assert "in phase train of step 4 for 3 s" in words
    assert "collective" not in words
    entered = activity.enter("sum", (3,), "float32")
    assert made._own_words().endswith(f", in collective {entered.describe()}")
    activity.leave(entered)
    assert made._own_words() == words


def test_who_is_waited_for_is_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rft_dist")
    made, _ = watch(0, 2)

    def told(seconds: float) -> list[str]:
        caplog.clear()
        ranks = {0: seen(0, call=call(), inside=True, call_seconds=seconds), 1: seen(1, call=call(4))}
        made._report_waiting(ranks, NOW)
        return [record.levelname for record in caplog.records]

    assert told(7.9) == []
    assert told(8.0) == ["INFO"]
    assert told(59.0) == []
    assert told(60.0) == ["WARNING"]
    assert told(299.0) == []
    assert told(300.0) == ["WARNING"]
    assert told(1799.0) == []
    assert told(1800.0) == ["WARNING"]
    assert told(9000.0) == []
    assert told(1.0) == []
    assert told(8.5) == ["INFO"], "a new wait begins anew"


def test_the_first_rank_alone_logs_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rft_dist")
    for rank in (1, 0):
        made, courier = watch(rank, 3)
        courier.seen = {other: seen(other) for other in range(3)}
        courier.seen[2] = seen(2, call=call(), inside=True, call_seconds=9.0)
        made._cause_of_all(NOW)
        assert len(caplog.records) == (rank == 0)


def test_the_guard_looks_on_until_there_is_a_cause(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    made, _ = watch(1, 2)
    decided: list[float] = []
    forgiven: list[float] = []
    ends: list[Cause] = []
    waits = iter([0.25, 0.25, 10.0, 0.25, 0.25])

    def wait(seconds: float) -> bool:
        assert seconds == 0.25
        clock[0] += next(waits)
        return False

    def decide(now: float) -> Cause | None:
        decided.append(now - NOW)
        return LATE if len(decided) == 4 else None

    monkeypatch.setattr(made._stop, "wait", wait)
    monkeypatch.setattr(made, "_decide", decide)
    monkeypatch.setattr(made, "_forgive", lambda now: forgiven.append(now - NOW))
    monkeypatch.setattr(made, "_end", ends.append)
    made._run()
    assert decided == [0.25, 0.5, 10.5, 10.75]
    assert forgiven == [10.5]
    assert ends == [LATE]


def test_heartbeats_are_exchanged_for_this_rank_at_the_given_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(monitor, "HeartbeatClient", lambda *given, **options: made.append((given, options)))
    store: Any = object()
    found = Watch(Activity(), SETTINGS, rank=1, world_size=3, store=store, serves_store=False, beat=0.25)
    assert made == [((store, found), {"rank": 1, "world_size": 3, "beat": 0.25})]
    Watch(Activity(), SETTINGS, rank=0, world_size=1, store=None, serves_store=False)
    assert len(made) == 1, "a process alone exchanges nothing"
