"""Statuses of ranks as JSON, and how long ago a rank went on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rft_dist.health.activity import Call
from rft_dist.health.heartbeat import LastSeen, Status, decode, no_heartbeat_yet

CALL = Call(12, "sum", (3, 4), "float32", "a.py:10 (step)")
STATUS = Status(
    rank=3,
    host="node-a",
    machine="boot pid net",
    pid=412,
    beat=5,
    phase="train",
    phase_seconds=2.5,
    step=7,
    steps_done=4,
    call=CALL,
    inside=True,
    call_seconds=1.5,
    idle_seconds=0.5,
    library_calls=9,
    stack=("loop.py:5 (run)", "main.py:1 (main)"),
    ended="finished",
)


@pytest.mark.parametrize("status", [STATUS, replace(STATUS, call=None, stack=(), ended=""), no_heartbeat_yet(2)])
def test_a_status_comes_back_from_json_as_it_went_in(status: Status) -> None:
    text = status.encode()
    assert decode(text) == decode(text.encode()) == status
    assert text == json.dumps(json.loads(text), separators=(",", ":")), "no spaces: a rank sends one every second"
    call = json.loads(text)["call"]
    assert call == (None if status.call is None else {**call, "number": 12, "shape": [3, 4], "site": CALL.site})


def test_a_status_names_its_rank_and_the_number_of_its_collective() -> None:
    assert STATUS.who == "rank 3 (node-a, pid 412)"
    assert STATUS.number == 12
    assert replace(STATUS, call=None).number == 0


def test_a_rank_without_a_heartbeat_is_at_the_start_and_in_no_collective() -> None:
    assert no_heartbeat_yet(2) == Status(
        rank=2,
        host="host unknown",
        machine="",
        pid=0,
        beat=0,
        phase="start",
        phase_seconds=0.0,
        step=0,
        steps_done=0,
        call=None,
        inside=False,
        call_seconds=0.0,
        idle_seconds=0.0,
        library_calls=0,
        stack=(),
        ended="",
    )


def test_a_rank_is_idle_since_it_went_on_and_not_only_since_its_heartbeat() -> None:
    last = LastSeen(STATUS, at=100.0)
    assert last.idle(103.0) == 3.5
    assert last.idle(100.0) == last.idle(99.0) == 0.5, "a heartbeat read a moment later than `now`"
