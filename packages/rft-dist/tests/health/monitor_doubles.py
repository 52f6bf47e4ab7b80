"""Doubles around the monitor of one process: a courier that holds what others said, and a guard that runs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rft_core.errors import PeerError
from rft_dist.health.activity import Activity, Call
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, no_heartbeat_yet
from rft_dist.health.monitor import Watch
from rft_dist.settings import WatchSettings

NOW = 1000.0
SETTINGS = WatchSettings(
    heartbeat_seconds=7.0, watchdog_seconds=300.0, watchdog_first_seconds=600.0, watchdog_collective_seconds=60.0
)
BROKEN = PeerError(code="collective.failed", what="w", where="r", why="y")
LATE = Cause("late", 1, "rank 1 is late", "limit", where="loop.py:5 (run)")


class Courier:
    """Holds what the others said, and records what it is asked to do."""

    def __init__(self, world_size: int) -> None:
        self.seen = {rank: seen(rank) for rank in range(world_size)}
        self.read_at: dict[int, float] = {}
        self.cause: Cause | None = None
        self.answered, self.lost, self.reads_all = NOW, "", False
        self.asked: list[str] = []
        self.in_force: Cause | None = None
        self.acknowledged = world_size
        self.present = True
        self.takes = True

    @property
    def has_all_heartbeats(self) -> bool:
        return self.asked.count("read") >= (0 if self.present else 3)

    def start(self) -> None:
        self.asked.append("start")

    def announce_now(self, seconds: float) -> bool:
        self.asked.append("announce")
        return self.takes

    def read_everyone(self, seconds: float) -> bool:
        self.asked.append("read")
        return True

    def publish(self, cause: Cause, seconds: float) -> Cause:
        self.asked.append("publish")
        return self.in_force or cause

    def acknowledge(self, seconds: float) -> None:
        self.asked.append("acknowledge")

    def num_acknowledged(self, seconds: float) -> int:
        self.asked.append("count")
        return self.acknowledged

    def stop(self) -> None:
        self.asked.append("stop")


class Guard:
    """The thread that decides, where nothing runs."""

    def __init__(self) -> None:
        self.alive, self.asked = False, list[str]()

    def start(self) -> None:
        self.asked.append("start")

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float) -> None:
        self.asked.append("join")


def seen(rank: int, at: float = NOW, **fields: Any) -> LastSeen:
    base = replace(no_heartbeat_yet(rank), host=f"node{rank}", pid=100 + rank, machine="elsewhere", steps_done=2)
    return LastSeen(replace(base, **fields), at)


def watch(
    rank: int = 1, world_size: int = 2, settings: WatchSettings = SETTINGS, **options: Any
) -> tuple[Watch, Courier]:
    serves = options.pop("serves_store", rank == 0)
    activity = options.pop("activity", None) or Activity(clock=lambda: NOW)
    made = Watch(
        activity, settings, rank=rank, world_size=world_size, store=None, serves_store=serves, beat=1.0, **options
    )
    courier = Courier(world_size)
    made._courier = courier  # type: ignore[assignment]
    made._guard = Guard()  # type: ignore[assignment]
    return made, courier


def call(number: int = 5, site: str = "a.py:10 (step)") -> Call:
    return Call(number, "sum", (3,), "float32", site)
