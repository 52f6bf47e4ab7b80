"""At which second each finding is made, of whom, and which one goes before which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rft_dist.health.activity import Call
from rft_dist.health.diagnosis import HealthLimits, mismatch, of_all, of_neighbours, waiting_for
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, no_heartbeat_yet
from rft_dist.health.process_state import ALIVE, GONE, STOPPED, UNKNOWN

NOW = 1000.0
LIMITS = HealthLimits(silence=7.0, phase=300.0, first=600.0, collective=60.0)


def call(number: int) -> Call:
    return Call(number, "sum", (3,), "float32", "a.py:10 (step)")


def seen(rank: int, made: int = 0, *, at: float = NOW, **fields: Any) -> LastSeen:
    """A heartbeat of this moment, of a rank that has ended a step; `made`: its last collective."""
    base = replace(no_heartbeat_yet(rank), steps_done=2, call=call(made) if made else None, stack=tuple("abcdefg"))
    return LastSeen(replace(base, **fields), at)


def inside(rank: int, made: int, seconds: float = 10.0, *, at: float = NOW, **fields: Any) -> LastSeen:
    return seen(rank, made, at=at, inside=True, call_seconds=seconds, idle_seconds=seconds, **fields)


def judged(*ranks: LastSeen, limits: HealthLimits = LIMITS, **more: Any) -> tuple[str, int] | None:
    found = of_all({each.status.rank: each for each in ranks}, limits, NOW, **more)
    return found and (found.kind, found.rank)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"at": NOW - 7.0}, None),
        ({"at": NOW - 7.1}, ("silent", 1)),
        ({"idle_seconds": 300.0}, None),
        ({"idle_seconds": 300.1}, ("late", 1)),
        ({"idle_seconds": 299.0, "at": NOW - 2.0}, ("late", 1)),
        ({"idle_seconds": 1e6, "at": NOW - 3.0}, None),
        ({"idle_seconds": 600.0, "steps_done": 0}, None),
        ({"idle_seconds": 600.1, "steps_done": 0}, ("late", 1)),
        ({"idle_seconds": 1e6, "ended": "stopping"}, None),
        ({"idle_seconds": 1e6, "inside": True, "call": call(4)}, None),
    ],
)
def test_a_rank_is_silent_or_late_above_its_limit(fields: dict[str, Any], found: tuple[str, int] | None) -> None:
    assert judged(seen(0), seen(1, **fields)) == found
    without = HealthLimits(silence=0.0, phase=0.0, first=0.0, collective=0.0)
    assert judged(seen(0), seen(1, **fields), limits=without) is None


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ((inside(0, 5, 60.0), inside(1, 5, 61.0)), None),
        ((inside(0, 5, 60.1), inside(1, 5, 61.0)), ("stuck", -1)),
        ((inside(0, 5, 58.0, at=NOW - 2.5), inside(1, 5, 61.0)), ("stuck", -1)),
        ((inside(0, 5, 62.5, at=NOW + 2.5), inside(1, 5, 61.0)), None),
        ((inside(0, 5, 99.0), inside(1, 6, 99.0)), None),
        ((inside(0, 5, 99.0), seen(1, 5)), None),
    ],
)
def test_all_ranks_are_stuck_above_the_limit_and_in_one_collective(
    ranks: tuple[LastSeen, ...], found: tuple[str, int] | None
) -> None:
    for world_size in (0, 2):
        assert judged(*ranks, world_size=world_size) == found
    assert judged(*ranks, world_size=3) is None
    assert judged(*ranks, limits=replace(LIMITS, collective=0.0)) is None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (seen(1, 4, at=NOW - 2.0, ended="finished"), None),
        (seen(1, 4, at=NOW - 2.1, ended="finished"), ("left", 1)),
        (seen(1, 5, at=NOW - 9.0, ended="finished"), None),
        (seen(1, 4, at=NOW - 2.1), None),
    ],
)
def test_a_rank_has_left_the_others_where_it_ended_before_their_collective(
    other: LastSeen, found: tuple[str, int] | None
) -> None:
    assert judged(inside(0, 5), other) == found


def test_of_several_ranks_at_fault_the_first_is_named() -> None:
    assert judged(seen(2, at=NOW - 8.0), seen(1, at=NOW - 9.0)) == ("silent", 1)
    assert judged(*(seen(rank, at=NOW - 9.0, ended="x") for rank in (2, 1)), inside(0, 5)) == ("left", 1)
    late: dict[str, Any] = {"idle_seconds": 400.0}
    assert judged(seen(2, **late), seen(1, **late)) == ("late", 1)
    assert judged(seen(1, library_calls=9, **late), seen(2, library_calls=8, **late)) == ("late", 2)
    calls = [inside(0, 5), seen(2, 5), seen(1, 5)]
    others = [calls[0], *(replace(each, status=replace(each.status, call=mismatched())) for each in calls[1:])]
    assert judged(*others, compares_calls=True) == ("mismatch", 1)
    states = {2: (GONE, NOW - 9.0), 1: (STOPPED, NOW - 9.0)}
    found = of_neighbours(states, {1: seen(1), 2: seen(2)}, NOW)
    assert found is not None
    assert (found.kind, found.rank) == ("stopped", 1)


def mismatched() -> Call:
    return replace(call(5), shape=(4,))


def test_what_makes_others_wait_goes_before_what_waiting_looks_like() -> None:
    silent = seen(1, at=NOW - 8.0)
    left = seen(2, 4, at=NOW - 5.0, ended="finished")
    late = seen(3, 4, idle_seconds=400.0)
    wrong = seen(4, call=mismatched())
    waits = inside(0, 5, 61.0)
    order = [(silent, "silent"), (wrong, "mismatch"), (left, "left"), (late, "late")]
    for number, (_, kind) in enumerate(order):
        found = judged(waits, *(each for each, _ in order[number:]), compares_calls=True)
        assert found is not None
        assert found[0] == kind
    assert judged(waits) == ("stuck", -1)


@pytest.mark.parametrize(
    ("state", "seconds", "kind"),
    [
        (GONE, 1.0, "gone"),
        (GONE, 0.9, None),
        (STOPPED, 3.0, "stopped"),
        (STOPPED, 2.9, None),
        (ALIVE, 99.0, None),
        (UNKNOWN, 99.0, None),
    ],
)
def test_a_neighbour_is_named_after_its_patience(state: str, seconds: float, kind: str | None) -> None:
    both = {0: seen(0), 1: seen(1)}
    found = of_neighbours({1: (state, NOW - seconds)}, both, NOW)
    assert (found.kind if found else None) == kind
    assert of_neighbours({1: (state, NOW - seconds)}, {1: seen(1, ended="finished")}, NOW) is None


def test_a_neighbour_is_never_silent_and_late_only_while_it_is_alive() -> None:
    old = seen(1, at=NOW - 400.0)
    states = (ALIVE, GONE, STOPPED)
    assert [judged(seen(0), old, neighbours={1: state}) for state in states] == [("late", 1), None, None]


def reached(other: LastSeen, *ranks: LastSeen) -> str:
    """What is said of a rank that fell silent."""
    found = of_all({each.status.rank: each for each in (other, *ranks)}, LIMITS, NOW)
    assert found is not None
    return found.what.partition("; ")[2]


def test_a_cause_says_which_collective_was_not_reached_and_who_waits_there() -> None:
    old: dict[str, Any] = {"at": NOW - 8.0}
    text = call(5).describe()
    waiting = inside(1, 5), inside(2, 5), inside(3, 3)
    assert reached(seen(0, 4, **old), *waiting).endswith(f"{text}, in which ranks 1, 2 wait")
    assert reached(inside(0, 5, **old), inside(1, 5)).endswith(f"in collective {text}, as are ranks 0, 1")
    assert reached(seen(0, 5, **old), inside(1, 5)) == f"its last collective is {text}"
    assert reached(inside(0, 5, **old), inside(1, 4)) == f"its last collective is {text} (not finished)"
    assert reached(seen(0, **old), seen(1, 9)) == "its last collective is none"
    many = reached(seen(0, 4, **old), *(inside(rank, 5) for rank in range(1, 19)))
    assert many.endswith(f"ranks {', '.join(map(str, range(1, 17)))} and 2 more wait")
    sixteen = reached(seen(0, 4, **old), *(inside(rank, 5) for rank in range(1, 17)))
    assert "more" not in sixteen


def test_a_cause_has_the_innermost_lines_of_the_rank_at_fault() -> None:
    found = of_all({0: seen(0, at=NOW - 8.0)}, LIMITS, NOW)
    assert found is not None
    assert found.where == "a; b; c; d; e"
    placeless = of_all({0: seen(0, at=NOW - 8.0, stack=())}, LIMITS, NOW)
    assert placeless is not None
    assert placeless.where == "no stack known"
    assert mismatch(1, "#5 sum at a.py:1 (f)", 2, "#5 max at b.py:2 (g)") == Cause(
        "mismatch",
        2,
        "rank 2 is in collective #5 max at b.py:2 (g), rank 1 in #5 sum at a.py:1 (f)",
        mismatch(0, "", 1, "").why,
        "a.py:1 (f) and b.py:2 (g)",
    )


def test_a_wait_is_told_from_its_second_on_with_the_rank_that_is_furthest_behind() -> None:
    ranks = {0: inside(0, 5, 8.0, at=NOW - 1.0), 1: inside(1, 5, 3.0), 2: seen(2, 4), 3: seen(3, 2), 4: seen(4, 2)}
    assert waiting_for(ranks, NOW, 9.1) == ""
    told = waiting_for(ranks, NOW, 9.0)
    assert told.startswith("ranks 0, 1 have waited 9 s in collective #5")
    assert "for rank 3 (" in told
    assert told.endswith(", a")
    assert waiting_for({0: inside(0, 5), 1: seen(1, 4, ended="finished")}, NOW, 1.0) == ""
    assert waiting_for({0: seen(0, 5), 1: seen(1, 4)}, NOW, 1.0) == ""
    stackless = waiting_for({0: inside(0, 5), 1: seen(1, 4, stack=())}, NOW, 1.0)
    assert stackless.endswith("no stack known")
    many = {rank: inside(rank, 5) for rank in range(20)} | {20: seen(20, 4)}
    assert waiting_for(many, NOW, 1.0).startswith(f"ranks {', '.join(map(str, range(16)))} have")
