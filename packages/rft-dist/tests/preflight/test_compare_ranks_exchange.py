"""The comparison of one rank at a time, against a store where the others have said all already."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import PeerError, PreflightError
from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.preflight import compare_ranks as module
from rft_dist.preflight.compare_ranks import Report, Subject, compare_ranks

TOKEN = "0123"


def place(rank: int, world_size: int) -> RankInfo:
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    return ranks_from_environment({**values, "NODE_RANK": f"{rank}"})


class Store:
    """Rows by key; every call is noted, as (what, key)."""

    def __init__(self, **rows: str) -> None:
        self.rows = {key.replace("_", "/"): value for key, value in rows.items()}
        self.calls: list[tuple[str, str]] = []

    def set(self, key: str, value: str, /) -> None:
        self.calls.append(("set", key))
        self.rows[key] = value

    def get(self, key: str, /) -> bytes:
        self.calls.append(("get", key))
        return self.rows[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self.calls += [("check", key) for key in keys]
        return all(key in self.rows for key in keys)


class Clock:
    """A clock on which a pause takes a second, and that tells the time of day by a list."""

    def __init__(self) -> None:
        self.now, self.pauses, self.times = 50.0, 0, [1000.0]
        self.on_pause: Callable[[], Any] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.pauses = self.now + 1.0, self.pauses + 1
        self.on_pause()

    def time(self) -> float:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the comparison, in which every rank can be reached."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "unreachable_next", lambda store, ranks, *, seconds: ())
    return made


def said(node: int, *problems: str, **facts: str) -> str:
    return json.dumps({"host": f"host{node}", "node": node, "facts": facts, "problems": problems})


def answered(*reports: str, skews: tuple[float, ...] = (), seen: tuple[str, ...] = ()) -> Store:
    """The store of rank 0 when ranks 1, 2 and so on have said all that they say."""
    store = Store()
    for rank, report in enumerate(reports, start=1):
        skew = skews[rank - 1] if skews else 0.0
        store.rows |= {f"facts/{rank}": report, f"seen/{rank}": seen[rank - 1] if seen else "", f"read/{rank}": ""}
        store.rows |= {f"clock/ask/{rank}": "", f"clock/skew/{rank}": f"{skew}"}
    return store


def judged(store: Store, folder: Path, *problems: str, **facts: str) -> Report:
    """What rank 0 finds; its run directory is a fact of every rank."""
    for key in [key for key in store.rows if key.startswith("facts/")]:
        report = json.loads(store.rows[key])
        store.rows[key] = json.dumps(report | {"facts": report["facts"] | {"run directory": str(folder / "run")}})
    world_size = 1 + sum(key.startswith("facts/") for key in store.rows)
    return compare_ranks(store, place(0, world_size), Subject(facts, folder / "run", problems), seconds=5.0)


def refused(store: Store, folder: Path, *problems: str, **facts: str) -> Any:
    with pytest.raises(PreflightError) as caught:
        judged(store, folder, *problems, **facts)
    assert caught.value.problem.code == "preflight.ranks_differ"
    return caught.value.problem


def test_rank_0_asks_in_the_order_in_which_the_others_answer(clock: Clock, tmp_path: Path) -> None:
    clock.times = [1234.5]
    store = answered(said(0, a="1"), said(1, a="1"), skews=(-7.0, 3.0))
    report = judged(store, tmp_path, a="1")
    assert report == Report(3, 2, 2, 7.0, report.notes)
    assert len(report.notes) == 1
    assert "-7.0" in report.notes[0]
    assert store.calls == [
        ("set", "facts/0"),
        ("set", "token"),
        *[("check", "clock/ask/1"), ("set", "clock/answer/1"), ("check", "clock/ask/2"), ("set", "clock/answer/2")],
        *[("check", "clock/skew/1"), ("check", "clock/skew/2"), ("get", "clock/skew/1"), ("get", "clock/skew/2")],
        *[("check", "facts/1"), ("check", "facts/2"), ("check", "seen/1"), ("check", "seen/2")],
        *[("get", "facts/0"), ("get", "facts/1"), ("get", "facts/2"), ("get", "seen/1"), ("get", "seen/2")],
        ("set", "verdict"),
        *[("check", "read/1"), ("check", "read/2")],
    ]
    assert (store.rows["clock/answer/1"], store.rows["clock/answer/2"]) == ("1234.5", "1234.5")
    assert clock.pauses == 0


def test_another_rank_answers_in_that_order_and_takes_the_verdict_of_rank_0(clock: Clock, tmp_path: Path) -> None:
    clock.times = [100.0, 104.0]
    verdict = {"error": None, "report": vars_of(Report(2, 1, 9, 0.5, ("note",)))}
    token = json.dumps({"path": str(tmp_path / "token"), "text": TOKEN})
    (tmp_path / "token").write_text(TOKEN)
    store = Store(token=token, clock_answer_1="50.0", verdict=json.dumps(verdict))
    subject = Subject({"a": "1"}, tmp_path / "run", ("broken",))
    assert compare_ranks(store, place(1, 2), subject, seconds=5.0) == Report(2, 1, 9, 0.5, ("note",))
    assert store.calls == [
        ("set", "facts/1"),
        *[("check", "token"), ("get", "token"), ("set", "seen/1")],
        *[("set", "clock/ask/1"), ("check", "clock/answer/1"), ("get", "clock/answer/1"), ("set", "clock/skew/1")],
        *[("check", "verdict"), ("get", "verdict"), ("set", "read/1")],
    ]
    assert store.rows["seen/1"] == ""
    assert store.rows["clock/skew/1"] == "52.0", "its clock was at 102 when rank 0's was at 50"
    assert json.loads(store.rows["facts/1"]) == {
        "host": socket.gethostname(),
        "node": 1,
        "facts": {"a": "1", "run directory": str(tmp_path / "run")},
        "problems": ["broken"],
    }


def vars_of(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in Report.__slots__}


def test_what_cannot_be_reached_is_a_problem_of_this_rank(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, RankInfo, float]] = []

    def unreachable(store: Any, ranks: RankInfo, *, seconds: float) -> tuple[str, ...]:
        asked.append((store, ranks, seconds))
        return ("far away",)

    monkeypatch.setattr(module, "unreachable_next", unreachable)
    store = Store()
    problem = refused(store, tmp_path, "broken")
    assert asked == [(store, place(0, 1), 5.0)]
    assert problem.where.split("\n    ")[1:] == ["node 0: broken", "node 0: far away"]


def test_one_rank_alone_agrees_with_itself(clock: Clock, tmp_path: Path) -> None:
    assert judged(Store(), tmp_path, a="1", b="2") == Report(1, 1, 3, 0.0, ())


@pytest.mark.parametrize(("skew", "late"), [(5.0, False), (-5.0, False), (5.5, True), (-5.5, True)])
def test_a_clock_that_is_off_by_more_than_five_seconds_is_noted(
    clock: Clock, tmp_path: Path, skew: float, late: bool
) -> None:
    report = judged(answered(said(1), skews=(skew,)), tmp_path)
    assert (report.clock_seconds, len(report.notes)) == (abs(skew), int(late))


def test_facts_that_both_have_are_compared_and_those_that_one_lacks_are_named(clock: Clock, tmp_path: Path) -> None:
    store = answered(said(1, "hot", a="1", b="3", empty="now", new="5"), seen=("gone",))
    problem = refused(store, tmp_path, a="1", b="2", only="4", empty="")
    assert problem.where.split("\n    ")[1:] == [
        "node 1: b | rank 0: 2 | here: 3",
        "node 1: empty | rank 0:  | here: now",
        "node 1: only | rank 0: 4 | here: absent",
        "node 1: new | rank 0: absent | here: 5",
        f"node 1: folder {tmp_path} | rank 0: holds the file that rank 0 wrote | here: gone",
        "node 1: hot",
    ]
    assert "(host1, rank 1)" in problem.what
    assert "in 6 things" in problem.what
    assert problem.do == "make b, empty, only and 3 more the same on all nodes, then start again"


@pytest.mark.parametrize(("count", "listed"), [(1, 1), (2, 2), (10, 10), (11, 10), (13, 10)])
def test_ten_differences_of_a_node_are_listed_and_the_others_counted(
    clock: Clock, tmp_path: Path, count: int, listed: int
) -> None:
    names = [f"fact{number:02d}" for number in range(count)]
    store = answered(said(1, **dict.fromkeys(names, "2")))
    problem = refused(store, tmp_path, **dict.fromkeys(names, "1"))
    rows = problem.where.split("\n    ")[1:]
    assert rows[:listed] == [f"node 1: {name} | rank 0: 1 | here: 2" for name in names[:listed]]
    assert rows[listed:] == ([f"node 1: and {count - 10} more"] if count > 10 else [])
    assert problem.what.endswith("in 1 thing" if count == 1 else f"in {count} things")


@pytest.mark.parametrize(
    ("members", "named"),
    [(1, "rank 1"), (2, "ranks 1, 2"), (8, "ranks 1, 2, 3, 4, 5, 6, 7, 8"), (9, "ranks 1, 2, 3, 4, 5, 6, 7, 8, ...")],
)
def test_ranks_of_a_node_that_differ_alike_are_named_once(
    clock: Clock, tmp_path: Path, members: int, named: str
) -> None:
    store = answered(*[said(1, a="2")] * members, said(2, a="3"))
    problem = refused(store, tmp_path, a="1")
    first, second = problem.what.split("; ")
    assert f"(host1, {named})" in first
    assert f"(host2, rank {members + 1})" in second
    assert problem.where.split("\n    ")[1:] == ["node 1: a | rank 0: 1 | here: 2", "node 2: a | rank 0: 1 | here: 3"]


def test_the_token_is_on_disk_before_others_look_for_it_and_gone_afterwards(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: on_disk.extend(path.read_text() for path in tmp_path.iterdir()))
    store = answered(said(1))
    assert judged(store, tmp_path).notes == ()
    token = json.loads(store.rows["token"])
    assert on_disk == [token["text"]] != [""]
    assert Path(token["path"]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_noted_and_not_compared(clock: Clock) -> None:
    store = answered(said(1))
    report = judged(store, Path("/proc/no_such_folder"))
    assert len(report.notes) == 1
    assert json.loads(store.rows["token"])["text"] == ""
    token = json.dumps({"path": "/no_such_folder/token", "text": ""})
    verdict = json.dumps({"error": None, "report": vars_of(report)})
    other = Store(token=token, clock_answer_1="0", verdict=verdict)
    assert compare_ranks(other, place(1, 2), Subject({}, Path("run")), seconds=5.0) == report
    assert other.rows["seen/1"] == ""
    assert clock.pauses == 0


def looked(clock: Clock, path: Path) -> str:
    """What rank 1 says of the token that rank 0 wrote at a path."""
    verdict = json.dumps({"error": None, "report": vars_of(Report(2, 2, 1, 0.0))})
    token = json.dumps({"path": str(path), "text": TOKEN})
    store = Store(token=token, clock_answer_1="0", verdict=verdict)
    clock.pauses = 0
    compare_ranks(store, place(1, 2), Subject({}, path.parent / "run"), seconds=5.0)
    return store.rows["seen/1"]


def test_a_token_may_take_three_seconds_to_come_and_what_is_there_instead_is_told(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "token"
    another = looked(clock, path)
    assert clock.pauses == 4, "it looks at 0, 1, 2, 3 and 4 seconds, of which the last is past the limit"
    missing = looked(clock, tmp_path / "none" / "token")
    path.write_text("of another run")
    wrong = looked(clock, path)
    assert len({another, missing, wrong, ""}) == 4
    assert ("another folder" in another, "not there" in missing) == (True, True)
    clock.on_pause = lambda: path.write_text(TOKEN)
    assert looked(clock, path) == ""
    assert clock.pauses == 1


BEFORE_VERDICT = {"token": json.dumps({"path": "", "text": ""}), "clock_answer_1": "0"}


@pytest.mark.parametrize(
    ("rank", "rows", "missing"),
    [
        (0, {}, "ranks 1, 2 "),
        (1, {}, "rank 0 "),
        (1, {"token": BEFORE_VERDICT["token"]}, "rank 0 "),
        (1, BEFORE_VERDICT, "rank 0 "),
    ],
)
def test_a_rank_is_waited_for_until_the_limit_and_then_named(
    clock: Clock, tmp_path: Path, rank: int, rows: dict[str, str], missing: str
) -> None:
    with pytest.raises(PeerError) as caught:
        compare_ranks(Store(**rows), place(rank, 3), Subject({}, tmp_path / "run"), seconds=2.0)
    assert caught.value.problem.code == "preflight.no_answer"
    assert caught.value.problem.what.startswith(missing)
    assert clock.pauses == 3
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_lost_is_an_error_of_a_peer(clock: Clock, tmp_path: Path) -> None:
    class Lost(Store):
        def set(self, key: str, value: str, /) -> None:
            raise RuntimeError("connection reset\nby a peer")

    with pytest.raises(PeerError) as caught:
        compare_ranks(Lost(), place(1, 2), Subject({}, tmp_path / "run"), seconds=2.0)
    assert caught.value.problem.code == "preflight.store_lost"
    assert caught.value.problem.why == "connection reset"


def test_an_error_of_rank_0_is_raised_on_every_rank(clock: Clock, tmp_path: Path) -> None:
    first = answered(said(1, a="2"))
    refused(first, tmp_path, a="1")
    rows = BEFORE_VERDICT | {"verdict": first.rows["verdict"]}
    with pytest.raises(PreflightError) as caught:
        compare_ranks(Store(**rows), place(1, 2), Subject({"a": "2"}, tmp_path / "run"), seconds=2.0)
    assert caught.value.problem.code == "preflight.ranks_differ"
