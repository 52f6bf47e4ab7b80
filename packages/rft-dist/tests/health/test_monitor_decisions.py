"""What the monitor of one process decides, without ranks: a courier that holds what others said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from monitor_doubles import NOW, SETTINGS, call, seen, watch

from rft_dist.health import monitor
from rft_dist.health.activity import Activity
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import FINISHED
from rft_dist.health.process_state import ALIVE, GONE, STOPPED, this_machine

pytestmark = pytest.mark.usefixtures("clock")


def test_a_cause_that_others_published_comes_first() -> None:
    made, courier = watch()
    courier.cause = Cause("late", 0, "w", "y")
    courier.seen[0] = seen(0, at=NOW - 60.0)
    assert made._decide(NOW) is courier.cause


def test_a_process_alone_is_judged_by_its_own_progress_until_it_ends(clock: list[float]) -> None:
    made, _ = watch(0, 1)
    made._courier = None
    assert made._decide(clock[0]) is None
    clock[0] += 601.0
    found = made._decide(clock[0])
    assert found is not None
    assert (found.kind, found.rank) == ("late", 0)
    made._ended = FINISHED
    assert made._decide(clock[0]) is None


def test_only_the_first_rank_judges_all_until_it_has_left() -> None:
    others = {2: seen(2, at=NOW - 60.0)}
    first, courier = watch(0, 3)
    courier.seen |= others
    found = first._decide(NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("silent", 2)
    third, courier = watch(1, 3)
    courier.seen |= others
    assert third._decide(NOW) is None
    courier.seen[0] = seen(0, ended=FINISHED)
    found = third._decide(NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("silent", 2)


def test_every_rank_judges_the_first_one() -> None:
    made, courier = watch(1, 3)
    courier.seen |= {0: seen(0, at=NOW - 60.0), 2: seen(2, at=NOW - 60.0)}
    found = made._decide(NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("silent", 0)


def test_a_neighbour_whose_process_lives_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, {101: ALIVE})
    made, courier = watch(0, 2)
    courier.seen[1] = seen(1, at=NOW - 60.0, machine=this_machine())
    assert made._decide(NOW) is None
    courier.seen[1] = seen(1, at=NOW - 60.0, machine="elsewhere")
    made._neighbours.clear()
    found = made._decide(NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("silent", 1)


def test_all_ranks_in_a_collective_are_stuck_only_where_all_are_known() -> None:
    activity = Activity(clock=lambda: NOW - 61.0)
    activity.enter("sum", (3,), "float32")
    made, courier = watch(0, 2, activity=activity)
    assert activity.last is not None
    stuck = {"call": activity.last.call, "inside": True, "call_seconds": 61.0, "idle_seconds": 61.0}
    courier.seen[1] = seen(1, **stuck)
    found = made._decide(NOW)
    assert found is not None
    assert found.kind == "stuck"
    larger, courier = watch(1, 3, activity=activity)
    courier.seen[0] = seen(0, **stuck)
    assert larger._decide(NOW) is None


def test_collectives_are_compared_where_the_settings_ask_for_it() -> None:
    activity = Activity(clock=lambda: NOW)
    mine = activity.enter("sum", (3,), "float32")
    other = replace(mine, shape=(4,))
    for steps, kind in ((1, "mismatch"), (0, None)):
        made, courier = watch(0, 2, replace(SETTINGS, fingerprint_steps=steps), activity=activity)
        courier.seen[1] = seen(1, call=other, inside=True)
        found = made._decide(NOW)
        assert (found.kind if found else None) == kind


def process(monkeypatch: pytest.MonkeyPatch, states: dict[int, str]) -> None:
    monkeypatch.setattr(monitor, "process_state", lambda pid: states[pid])


def test_a_neighbour_that_is_gone_is_named_once_its_last_word_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process(monkeypatch, {100: ALIVE, 101: GONE, 102: GONE})
    made, courier = watch(0, 3)
    courier.seen = {0: seen(0), 1: seen(1, machine=this_machine()), 2: seen(2)}
    assert made._decide(NOW) is None, "a moment of patience, and its last heartbeat is read first"
    assert courier.reads_all
    assert set(made._neighbours) == {1}, "those of other machines are not judged by numbers of processes"
    courier.answered = NOW + 2.0
    assert made._decide(NOW + 2.0) is None
    courier.read_at[1] = NOW + 1.0
    found = made._decide(NOW + 2.0)
    assert found is not None
    assert (found.kind, found.rank) == ("gone", 1)


def test_a_neighbour_is_judged_without_its_last_word_where_the_store_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process(monkeypatch, {100: GONE, 101: ALIVE})
    for lost, answered in (("closed", NOW + 2.0), ("", NOW - 1.1)):
        made, courier = watch(1, 2)
        courier.seen = {0: seen(0, machine=this_machine()), 1: seen(1, machine=this_machine())}
        assert made._decide(NOW) is None
        courier.lost, courier.answered = lost, answered
        found = made._decide(NOW + 2.0)
        assert found is not None
        assert (found.kind, found.rank) == ("gone", 0)
    made, courier = watch(1, 2)
    courier.seen = {0: seen(0, machine=this_machine()), 1: seen(1)}
    made._decide(NOW)
    courier.answered = NOW - 0.9
    assert made._decide(NOW + 2.0) is None, "two beats and a second are no silence"


def test_a_neighbour_s_patience_begins_anew_with_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {101: STOPPED}
    process(monkeypatch, states)
    made, courier = watch(0, 2)
    courier.seen[1] = seen(1, machine=this_machine())
    courier.read_at[1] = NOW + 10.0
    courier.answered = NOW + 4.0
    assert made._decide(NOW) is None
    states[101] = GONE
    assert made._decide(NOW + 4.0) is None
    assert made._neighbours[1] == (GONE, NOW + 4.0)
    states[101] = ALIVE
    assert made._decide(NOW + 4.5) is None
    assert not courier.reads_all


def test_a_store_that_does_not_answer_is_named_after_the_silence() -> None:
    made, courier = watch(1, 2)
    first = {"stack": tuple("abcdefg")}
    courier.seen[0] = seen(0, at=NOW + 7.0, **first)
    assert made._store_cause(NOW + 7.0) is None
    found = made._store_cause(NOW + 7.5)
    assert found is not None
    assert (found.kind, found.rank, found.told_by, found.where) == ("store", 0, 1, "a; b; c; d; e")
    assert "8 s" in found.what
    assert "rank 0 (node0, pid 100)" in found.what
    decided = made._decide(NOW + 7.5)
    assert decided is not None
    assert decided.kind == "store"
    assert watch(0, 2)[0]._store_cause(NOW + 60.0) is None, "who serves it does not judge it"
    unlimited, _ = watch(1, 2, replace(SETTINGS, heartbeat_seconds=0.0))
    assert unlimited._store_cause(NOW + 1e6) is None


def test_a_lost_store_is_named_after_a_beat_and_a_second() -> None:
    made, courier = watch(1, 2)
    courier.lost = "closed by peer"
    assert made._store_cause(NOW + 1.9) is None
    found = made._store_cause(NOW + 2.0)
    assert found is not None
    assert "closed by peer" in found.why
    assert not found.where
    made._neighbours[0] = (GONE, NOW)
    assert made._store_cause(NOW + 2.0) is None, "its process says more"
    made._neighbours[0] = (ALIVE, NOW)
    assert made._store_cause(NOW + 2.0) is not None
    courier.seen[0] = seen(0, ended=FINISHED)
    assert made._decide(NOW + 2.0) is None, "it has left in order"


def test_a_rank_that_has_ended_counts_from_its_end() -> None:
    made, courier = watch(0, 2)
    courier.seen[1] = seen(1, call=call(), inside=True)
    made._ended, made._ended_at = FINISHED, NOW - 2.5
    found = made._decide(NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("left", 0)
    made._ended_at = NOW - 1.5
    assert made._decide(NOW) is None


def test_a_process_that_was_stopped_forgives_what_it_knows_of_others() -> None:
    made, courier = watch(0, 2)
    made._neighbours[1] = (GONE, NOW)
    courier.seen[1] = seen(1, at=NOW - 100.0, pid=7)
    courier.answered = NOW - 100.0
    made._forgive(NOW)
    assert not made._neighbours
    assert courier.answered == NOW
    assert all(each.at == NOW for each in courier.seen.values())
    assert courier.seen[1].status.pid == 7
