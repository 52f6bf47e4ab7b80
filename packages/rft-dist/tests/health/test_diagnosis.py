"""What the heartbeats of all ranks say, without threads, clocks or a store."""

from __future__ import annotations

import pytest

from rft_dist.health import diagnosis
from rft_dist.health.activity import Call
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, Status
from rft_dist.health.process_state import ALIVE, GONE, STOPPED
from rft_dist.health.report import page

LIMITS = diagnosis.HealthLimits(silence=7.0, phase=300.0, first=600.0, collective=60.0)
NOW = 1000.0


def call(number: int, name: str = "sum", shape: tuple[int, ...] = (3,), site: str = "a.py:10 (step)") -> Call:
    return Call(number, name, shape, "float32", site)


def seen(rank: int, made: Call | None = None, **fields) -> LastSeen:
    """A heartbeat read half a second ago, of a rank that has ended a step and is in no collective."""
    base = {
        "host": f"node{rank}",
        "machine": "m",
        "pid": 100 + rank,
        "beat": 5,
        "phase": "train",
        "phase_seconds": 2.0,
        "step": 3,
        "steps_done": 2,
        "inside": False,
        "call_seconds": 1.0,
        "idle_seconds": 1.0,
        "library_calls": 0,
        "stack": ("loop.py:5 (run)",),
    }
    at = fields.pop("at", NOW - 0.5)
    return LastSeen(Status(rank=rank, call=made, **(base | fields)), at)


def waits(rank: int, number: int, seconds: float = 10.0, **fields) -> LastSeen:
    return seen(rank, call(number), inside=True, call_seconds=seconds, idle_seconds=seconds, **fields)


def judged(*ranks: LastSeen, **more) -> Cause | None:
    return diagnosis.of_all({each.status.rank: each for each in ranks}, LIMITS, NOW, **more)


def test_ranks_at_work_are_no_reason_to_end() -> None:
    assert judged(seen(0), seen(1, call(4), idle_seconds=299.0)) is None
    assert (
        judged(waits(0, 5, 250.0), seen(1, call(4), phase="rollout", phase_seconds=250.0, idle_seconds=250.0)) is None
    )
    assert judged(waits(0, 5, 59.0), waits(1, 5, 59.0)) is None


def test_a_rank_that_waits_is_never_the_culprit_of_a_long_phase() -> None:
    slow = seen(1, call(4), phase="rollout", phase_seconds=312.0, idle_seconds=312.0)
    found = judged(waits(0, 5, 312.0), slow)
    assert found is not None
    assert (found.kind, found.rank) == ("late", 1)
    assert "has been in phase rollout of step 3 for 312 s" in found.what
    assert "did not reach collective #5 sum [3] float32 at a.py:10 (step), in which ranks 0 wait" in found.what
    assert "at most 300 s" in found.why
    assert found.where == "loop.py:5 (run)"


def test_before_the_first_step_has_ended_the_other_limit_holds() -> None:
    assert judged(seen(0), seen(1, steps_done=0, idle_seconds=599.0)) is None
    found = judged(seen(0), seen(1, steps_done=0, idle_seconds=601.0))
    assert found is not None
    assert "--watchdog_first_seconds" in found.why
    unlimited = diagnosis.HealthLimits(silence=7.0, phase=300.0, first=0.0, collective=60.0)
    assert diagnosis.of_all({1: seen(1, steps_done=0, idle_seconds=1e6)}, unlimited, NOW) is None


def test_inside_libraries_the_rank_with_the_fewest_collectives_is_at_fault() -> None:
    found = judged(*(seen(rank, library_calls=count, idle_seconds=400.0) for rank, count in enumerate((9, 9, 8, 9))))
    assert found is not None
    assert (found.kind, found.rank) == ("late", 2)


def test_a_silent_rank_is_named_unless_its_process_can_be_seen_to_run() -> None:
    silent = seen(1, call(4), at=NOW - 7.5)
    found = judged(waits(0, 5), silent)
    assert found is not None
    assert (found.kind, found.rank) == ("silent", 1)
    assert "node1, pid 101" in found.what
    assert judged(waits(0, 5), seen(1, call(4), at=NOW - 6.5)) is None
    assert judged(waits(0, 5), silent, neighbours={1: ALIVE}) is None
    assert judged(waits(0, 5), seen(1, call(4), at=NOW - 60.0, ended="finished"), compares_calls=True) is not None


def test_a_rank_that_is_alive_and_holds_the_lock_is_judged_by_its_phase() -> None:
    holds = seen(1, call(4), at=NOW - 301.0)
    found = judged(waits(0, 5), holds, neighbours={1: ALIVE})
    assert found is not None
    assert found.kind == "late"
    assert judged(waits(0, 5), holds, neighbours={1: STOPPED}) is None


def test_all_ranks_in_one_collective_for_too_long() -> None:
    found = judged(waits(0, 5, 61.0), waits(1, 5, 62.0))
    assert found is not None
    assert (found.kind, found.rank) == ("stuck", -1)
    assert "all 2 ranks have been in collective #5" in found.what
    assert judged(waits(0, 5, 61.0), waits(1, 6, 62.0)) is None
    assert judged(waits(0, 5, 61.0), waits(1, 5, 62.0), world_size=4) is None


@pytest.mark.parametrize(
    "other",
    [
        call(5, "max"),
        call(5, shape=(4,)),
        call(5, shape=(3, 1)),
        Call(5, "sum", (3,), "float64", "a.py:10 (step)"),
        call(5, site="a.py:11 (step)"),
    ],
)
def test_two_calls_of_one_number_that_differ_are_named_with_both_lines(other: Call) -> None:
    found = judged(waits(0, 5), seen(1, other, inside=True), compares_calls=True)
    assert found is not None
    assert (found.kind, found.rank) == ("mismatch", 1)
    assert call(5).describe() in found.what
    assert other.describe() in found.what
    assert judged(waits(0, 5), seen(1, other, inside=True)) is None


def test_the_two_sides_of_a_broadcast_may_stand_on_two_lines_of_one_function() -> None:
    first, second = (call(5, "broadcast", site=f"a.py:{line} (find)") for line in (10, 14))
    assert first.matches(second)
    assert not first.matches(call(5, "broadcast", site="a.py:14 (other)"))
    assert not first.matches(call(5, "broadcast", (4,), site="a.py:14 (find)"))


def test_a_rank_that_left_is_named_only_after_a_moment_and_only_if_somebody_waits() -> None:
    gone = seen(1, call(4), ended="finished", at=NOW - 5.0)
    found = judged(waits(0, 5), gone)
    assert found is not None
    assert (found.kind, found.rank) == ("left", 1)
    assert judged(waits(0, 5), seen(1, call(4), ended="finished", at=NOW - 1.0)) is None
    assert judged(seen(0, call(4)), gone) is None


def test_a_neighbour_whose_process_ended_or_stopped_is_named_after_a_moment() -> None:
    both = {0: waits(0, 5), 1: seen(1, call(4))}
    for state, kind, enough, short in ((GONE, "gone", 1.5, 0.5), (STOPPED, "stopped", 3.5, 2.5)):
        found = diagnosis.of_neighbours({1: (state, NOW - enough)}, both, NOW)
        assert found is not None
        assert (found.kind, found.rank) == (kind, 1)
        assert "did not reach collective #5" in found.what
        assert diagnosis.of_neighbours({1: (state, NOW - short)}, both, NOW) is None
    ended = {0: seen(0), 1: seen(1, ended="finished")}
    assert diagnosis.of_neighbours({1: (GONE, NOW - 60.0)}, ended, NOW) is None
    assert diagnosis.of_neighbours({1: (ALIVE, NOW - 60.0)}, both, NOW) is None


def test_who_is_waited_for_is_told_before_any_limit() -> None:
    both = {0: waits(0, 5, 9.0), 1: seen(1, call(4), phase="data")}
    told = diagnosis.waiting_for(both, NOW, 8.0)
    assert told.startswith(
        "ranks 0 have waited 10 s in collective #5 sum [3] float32 at a.py:10 (step) for rank 1 (node1"
    )
    assert "in phase data of step 3" in told
    assert diagnosis.waiting_for(both, NOW, 60.0) == ""
    assert diagnosis.waiting_for({0: waits(0, 5), 1: waits(1, 5)}, NOW, 1.0) == ""


def test_the_page_shows_every_rank_and_the_stack_of_the_one_at_fault() -> None:
    ranks = {0: waits(0, 5), 1: seen(1, call(4), phase="data", stack=("data.py:9 (read)", "loop.py:5 (run)"))}
    text = page(Cause("late", 1, "rank 1 is late", "limit"), ranks, NOW)
    lines = text.splitlines()
    assert lines[0] == "the run ends: rank 1 is late"
    row = next(line for line in lines if "node1" in line)
    assert "data 2 s" in row
    assert "#4 sum [3] float32 at a.py:10 (step)" in row
    assert "done" in row
    assert "inside" in next(line for line in lines if "node0" in line)
    assert lines[-2:] == ["    data.py:9 (read)", "    loop.py:5 (run)"]
    many = {rank: seen(rank) for rank in range(200)}
    shown = page(Cause("late", 199, "rank 199 is late", "limit"), many, NOW)
    assert "node199" in shown
    assert "and 136 more ranks" in shown
