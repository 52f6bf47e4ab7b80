"""The page that every rank prints at the end of a run."""

from __future__ import annotations

from typing import Any

from rft_dist.health.activity import Call
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, Status, no_heartbeat_yet
from rft_dist.health.report import page


def seen(rank: int, **fields: Any) -> LastSeen:
    first = no_heartbeat_yet(rank)
    return LastSeen(Status(**{name: getattr(first, name) for name in first.__slots__} | fields), 100.0)


def test_a_row_of_the_page_says_all_of_a_rank() -> None:
    call = Call(5, "sum", (3,), "float32", "a.py:1 (f)")
    fields: dict[str, Any] = {
        "host": "node-a",
        "pid": 7,
        "step": 3,
        "phase": "train",
        "phase_seconds": 2.4,
        "idle_seconds": 4.0,
    }
    text = page(Cause("late", 9, "w", "y"), {0: seen(0, call=call, inside=True, **fields)}, 101.5)
    cells = [cell.strip() for cell in text.splitlines()[-1].split("  ") if cell.strip()]
    assert cells == ["0", "node-a", "7", "1.5 s ago", "3", "train 2 s", call.describe(), "inside", "6 s"]
    for more, state in (({"call": call}, "done"), ({"call": call, "inside": True, "ended": "finished"}, "finished")):
        assert f"  {state}  " in page(Cause("late", 9, "w", "y"), {0: seen(0, **fields, **more)}, 101.5)
    assert "  none  " in page(Cause("late", 9, "w", "y"), {0: seen(0, **fields)}, 101.5)
    assert "0.0 s ago" in page(Cause("late", 9, "w", "y"), {0: seen(0)}, 99.0)


def test_the_page_has_a_place_and_the_trace_or_the_stack_of_the_rank_at_fault() -> None:
    ranks = {0: seen(0), 1: seen(1, stack=tuple(f"f{number}.py:1" for number in range(12)))}
    placed = page(Cause("late", 1, "w", "y", "a.py:3"), ranks, 100.0).splitlines()
    assert placed[2].split() == ["where", "a.py:3"]
    assert placed[-8:] == [f"    f{number}.py:1" for number in range(8)]
    assert not any("where" in line for line in page(Cause("late", 1, "w", "y"), ranks, 100.0).splitlines())
    failed = page(Cause("failure", 1, "w", "y", error={"traceback": ["one", "two"]}), ranks, 100.0).splitlines()
    assert failed[-2:] == ["    one", "    two"]
    assert "more ranks" not in page(Cause("late", 0, "w", "y"), {rank: seen(rank) for rank in range(64)}, 100.0)
    many = page(Cause("late", 70, "w", "y"), {rank: seen(rank, host=f"h{rank}") for rank in range(71)}, 100.0)
    assert "and 7 more ranks" in many
    shown = [line.split()[0] for line in many.splitlines()[3:-1]]
    assert shown == [*map(str, range(63)), "70"]


def test_a_cause_of_any_length_leaves_a_page_that_can_be_read() -> None:
    value = "x" * 100_000 + "\n  why    nothing" + "\x1b[2J" * 100_000
    text = page(Cause("late", 9, value, value, value), {0: seen(0)}, 100.0)
    assert len(text) < 4_000
    assert [line[:9] for line in text.splitlines() if line.startswith("  why")] == ["  why    "]
    assert "\x1b" not in text


def test_the_columns_of_all_rows_begin_below_their_heads() -> None:
    ranks = {0: seen(0, host="a"), 10: seen(10, host="a-long-name", pid=123_456_789, step=1_000_000)}
    head, *rows = page(Cause("late", 9, "w", "y"), ranks, 100.0).splitlines()[2:]
    for name, cells in (("host", ("a", "a-long-name")), ("pid", ("0", "123456789")), ("step", ("0", "1000000"))):
        for row, cell in zip(rows, cells, strict=True):
            assert row[head.index(name) :].split()[0] == cell
            assert row[head.index(name) - 2 : head.index(name)] == "  "
