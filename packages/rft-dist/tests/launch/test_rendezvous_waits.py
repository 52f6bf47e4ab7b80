"""How long ranks wait for one another, what is told meanwhile, and with which store: by a clock that waiting moves."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError
from rft_dist.launch import rendezvous
from rft_dist.launch.environment import RankInfo
from rft_dist.launch.rendezvous import another_client, meet, serves_store, this_process


def info(rank: int, world_size: int = 3, port: int = 29500) -> RankInfo:
    names: list[str] = ["master_addr", "master_port", "rank", "world_size"]
    return RankInfo(rank, world_size, rank, 0, "host", port, dict.fromkeys(names, "by hand"))


class World:
    """A clock, what happens when it has reached a second, the ranks' store, and what was told and opened."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = HashStore()
        self.events: list[tuple[float, Callable[[], Any]]] = []
        self.told: list[tuple[float, int]] = []
        self.opened: list[tuple[Any, ...]] = []
        self.probed: list[tuple[Any, ...]] = []
        self.obstacle: Exception | None = None

    @property
    def waited(self) -> float:
        return self.now - 100.0

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 3)  # so that a time is reached exactly
        due = [event for event in self.events if event[0] <= self.waited]
        self.events = [event for event in self.events if event not in due]
        for _, action in due:
            action()

    def log(self, level: int, *_: object) -> None:
        self.told.append((round(self.waited, 3), level))

    def open(self, *arguments: Any, **options: Any) -> Store:
        self.opened.append((*arguments, options))
        return self.store

    def connect(self, address: tuple[str, int], timeout: float) -> Any:
        self.probed.append((*address, timeout))
        if self.obstacle is not None:
            raise self.obstacle
        return threading.Lock()  # a context manager, as a socket is one

    def keys(self, attempt: int = 0) -> Store:
        return PrefixStore(f"rft/attempt_{attempt}", self.store)

    def arrive(self, rank: int, world_size: int = 3, attempt: int = 0) -> None:
        """What a rank writes of itself."""
        keys = self.keys(attempt)
        keys.add(f"claims/{rank}", 1)
        keys.set(f"world_size/{rank}", f"{world_size}")
        keys.set(f"present/{rank}", f"rank {rank}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    log = SimpleNamespace(log=made.log, warning=lambda *words: made.log(logging.WARNING, *words))
    monkeypatch.setattr(rendezvous, "_LOG", log)
    monkeypatch.setattr(rendezvous, "TCPStore", made.open)
    monkeypatch.setattr(socket, "create_connection", made.connect)
    return made


def refused(world: World, code: str, rank: int, seconds: float = 30.0, world_size: int = 3) -> PeerError:
    with pytest.raises(PeerError) as caught:
        meet(info(rank, world_size), seconds, {})
    assert caught.value.problem.code == code
    return caught.value


def test_a_rank_writes_what_the_others_read_and_returns_once_all_are_there(world: World) -> None:
    world.events = [(4.0, lambda: world.arrive(1, attempt=2)), (5.0, lambda: world.arrive(2, attempt=2))]
    store = meet(info(0), 30.0, {"TORCHELASTIC_RESTART_COUNT": "2"})
    keys = world.keys(2)
    assert keys.get("world_size/0") == b"3"
    assert keys.get("present/0").decode() == this_process(info(0)) == store.get("present/0").decode()
    assert keys.add("claims/0", 0) == 1
    assert world.waited == 5.0
    assert world.told == []
    assert world.opened == [
        ("host", 29500, 3, True, timedelta(seconds=30), {"wait_for_workers": False, "multi_tenant": True})
    ]
    assert world.probed == []


@pytest.mark.parametrize(("rank", "level"), [(0, logging.WARNING), (2, logging.INFO)])
def test_a_wait_is_told_every_ten_seconds_then_every_minute_aloud_by_the_lowest_rank(
    world: World, rank: int, level: int
) -> None:
    world.arrive(2 - rank)
    error = refused(world, "launch.rendezvous_incomplete", rank, seconds=200.0)
    assert world.told == [(second, level) for second in (10, 20, 30, 40, 50, 60, 120, 180)]
    assert world.waited == pytest.approx(200.02)
    assert error.problem.what.endswith("present 0, 2, missing 1")


def test_of_many_missing_ranks_the_first_are_named(world: World) -> None:
    for rank in range(1, 4):
        world.arrive(rank, 21)
    what = refused(world, "launch.rendezvous_incomplete", 0, 1.0, world_size=21).problem.what
    assert what.endswith(f"missing {', '.join(map(str, range(4, 20)))} and 1 more")


def test_ranks_with_another_world_size_and_ranks_that_are_taken_are_refused_at_once(world: World) -> None:
    world.arrive(1, world_size=4)
    refused(world, "launch.world_size_differs", 0)
    assert refused(world, "launch.duplicate_rank", 1).problem.what.endswith("rank 1")
    world.keys().add("claims/2", 1)
    assert refused(world, "launch.duplicate_rank", 2).problem.what.endswith("another one")
    assert world.waited == 0.0


def test_a_client_looks_for_the_master_and_has_the_rest_of_the_time_for_its_store(world: World) -> None:
    world.obstacle = ConnectionRefusedError()
    world.events = [(25.0, lambda: setattr(world, "obstacle", None))]
    for rank in (0, 2):
        world.arrive(rank)
    meet(info(1), 40.0, {})
    assert world.told == [(10, logging.WARNING), (20, logging.WARNING)]
    assert world.probed[0] == ("host", 29500, 3.0)
    [(*_, serves, limit, _)] = world.opened
    assert not serves
    assert limit == timedelta(seconds=15)


def test_a_client_that_finds_the_master_late_has_a_second_left(world: World) -> None:
    world.obstacle = ConnectionRefusedError()
    world.events = [(39.85, lambda: setattr(world, "obstacle", None))]
    for rank in (0, 2):
        world.arrive(rank)
    meet(info(1), 40.0, {})
    assert world.opened[0][4] == timedelta(seconds=1)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (socket.gaierror(-2, "Name or service not known"), "host has no address"),
        (TimeoutError(), "no answer"),
        (ConnectionRefusedError(), "refused"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
        (OSError("odd"), "OSError"),
    ],
)
def test_a_master_that_cannot_be_reached_is_told_with_the_reason(world: World, error: Exception, word: str) -> None:
    world.obstacle = error
    found = refused(world, "launch.cannot_reach_master", 1, seconds=130.0)
    assert word in found.problem.why
    assert [second for second, _ in world.told] == [10, 20, 30, 40, 50, 60, 120]
    assert world.waited == 130.0
    assert world.opened == []


@pytest.mark.parametrize(("rank", "code"), [(0, "launch.cannot_listen"), (1, "launch.cannot_reach_master")])
def test_a_store_that_cannot_be_opened_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, rank: int, code: str
) -> None:
    def fail(*_: Any, **__: Any) -> Store:
        raise RuntimeError("the first line\nthe second line")

    monkeypatch.setattr(rendezvous, "TCPStore", fail)
    assert refused(world, code, rank).problem.why == "the first line"


def test_a_store_that_does_not_answer_is_told_again_and_again_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    asked = threading.Event()
    ended = threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        asked.set()
        ended.wait(20.0)

    monkeypatch.setattr(rendezvous, "TCPStore", hang)
    monkeypatch.setattr(rendezvous, "_REPORT_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "_LOG", SimpleNamespace(warning=lambda text, *_: told.append(text)))
    with pytest.raises(PeerError) as caught:
        meet(info(0), 0.05, {})
    ended.set()
    assert caught.value.problem.code == "launch.cannot_listen"
    assert asked.is_set()
    assert told


def test_a_store_that_is_lost_on_the_way_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> int:
        raise RuntimeError

    monkeypatch.setattr(rendezvous, "PrefixStore", lambda *_: SimpleNamespace(add=lost))
    assert refused(world, "launch.store_lost", 0).problem.why == "no reason was given"


def test_another_client_has_a_connection_of_its_own_to_the_keys_of_the_attempt(world: World) -> None:
    world.arrive(1, attempt=3)
    found = another_client(info(0), {"TORCHELASTIC_RESTART_COUNT": "3"})
    assert found.get("present/1") == b"rank 1"
    assert world.opened[0][3:5] == (False, timedelta(seconds=60))


@pytest.mark.parametrize(
    ("rank", "agent", "serves"), [(0, None, True), (0, "True", False), (0, "False", True), (1, None, False)]
)
def test_the_first_rank_serves_the_store_unless_torchrun_does(rank: int, agent: str | None, serves: bool) -> None:
    assert serves_store(info(rank), {} if agent is None else {"TORCHELASTIC_USE_AGENT_STORE": agent}) is serves
