"""With what a process group and a watch are started, on doubles of torch, the store and the watch."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError
from rft_dist.collectives import SingleProcess
from rft_dist.health.activity import Activity
from rft_dist.health.monitor import BEAT_SECONDS
from rft_dist.launch import process_group
from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.launch.process_group import (
    HealthConfig,
    meet_ranks,
    start_process_group,
    start_watch,
    stop_process_group,
)
from rft_dist.launch.rendezvous import this_process
from rft_dist.settings import WatchSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
LIMITS = {"watchdog_seconds": 300.0, "watchdog_first_seconds": 900.0, "watchdog_collective_seconds": 700.0}
ALONE = ranks_from_environment({})


def info(rank: int = 1, world_size: int = 3) -> RankInfo:
    values = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    return ranks_from_environment(values)


class World:
    """Stores under their names, and what was called with what, in order."""

    def __init__(self) -> None:
        self.met, self.another = HashStore(), HashStore()
        self.calls: list[tuple[Any, ...]] = []
        self.size, self.fails = 0, ""

    def record(self, name: str) -> Any:
        def called(*arguments: Any, **options: Any) -> SimpleNamespace:
            self.calls.append((name, *arguments, options))
            return SimpleNamespace(**{"compare": None, **options}, start=lambda: self.calls.append((f"{name} starts",)))

        return called

    def init(self, backend: str, *, store: PrefixStore, **options: Any) -> None:
        store.set("name", "group")
        self.calls.append(("init", backend, options))
        if self.fails:
            raise RuntimeError(self.fails)
        self.size = options["world_size"]

    def destroy(self) -> None:
        self.calls.append(("destroy",))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    dist = SimpleNamespace(
        is_initialized=lambda: made.size > 0, init_process_group=made.init, destroy_process_group=made.destroy
    )
    doubles = {
        "dist": dist,
        "atexit": SimpleNamespace(register=made.record("atexit")),
        "gc": SimpleNamespace(collect=made.record("collect")),
        "meet": lambda *arguments: made.calls.append(("meet", *arguments)) or made.met,
        "another_client": lambda *arguments: made.calls.append(("client", *arguments)) or made.another,
        "record_flights": made.record("record"),
        "is_single_process_group": lambda: made.size == 1,
    }
    doubles |= {name: made.record(name) for name in ("TorchCollectives", "FingerprintCheck", "Watch")}
    for name, double in doubles.items():
        monkeypatch.setattr(process_group, name, double)
    monkeypatch.setenv("NCCL_TIMEOUT", "44")
    monkeypatch.setenv("RFT_START_TIMEOUT", "33")
    return made


def health(always: bool = False, **limits: float) -> HealthConfig:
    return HealthConfig(Activity(), WatchSettings(**{**LIMITS, "fingerprint_steps": 4, **limits}), always)


def test_the_ranks_meet_for_as_long_as_the_environment_says(world: World) -> None:
    assert meet_ranks(ALONE, {}) is None
    assert isinstance(start_process_group(ALONE, CPU), SingleProcess)
    assert world.calls == []
    assert meet_ranks(info(1, 2), {}) is world.met
    world.calls.clear()
    values = {"RFT_START_TIMEOUT": "5"}
    assert meet_ranks(info(), values) is world.met
    assert world.calls == [("meet", info(), 5.0, values)]
    meet_ranks(info())
    assert world.calls[1][2] == 33.0


def test_a_group_is_started_between_comparing_and_the_first_collective(world: World) -> None:
    def compare(store: Any) -> None:
        store.set("name", "preflight")
        world.calls.append(("compare",))

    start_process_group(info(), CPU, environment={"NCCL_TIMEOUT": "7"}, compare=compare)
    assert [call[0] for call in world.calls] == ["atexit", "meet", "compare", "init", "TorchCollectives"]
    assert world.calls[0][1] is stop_process_group
    assert world.calls[1][2] == 7.0
    options = {"rank": 1, "world_size": 3, "timeout": timedelta(seconds=7), "device_id": None}
    assert world.named("init") == [("gloo", options)]
    where = this_process(info())
    assert world.named("TorchCollectives") == [(CPU, {"where": where})]
    for name in ("group", "preflight"):
        assert PrefixStore(name, world.met).get("name").decode() == name
    with pytest.raises(AssertionError):
        start_process_group(info(), CPU)


def test_two_ranks_are_a_group(world: World) -> None:
    start_process_group(info(1, 2), CPU, environment={}, watched=HealthConfig(Activity(), WatchSettings()))
    assert world.named("init")[0][1]["world_size"] == 2
    assert world.named("FingerprintCheck")[0][2]["always"] is False


def test_a_store_that_is_given_is_that_at_which_the_ranks_have_met(world: World) -> None:
    store = HashStore()
    start_process_group(info(), CPU, store=store)
    assert world.named("meet") == []
    assert PrefixStore("group", store).get("name") == b"group"
    assert world.named("init")[0][1]["timeout"] == timedelta(seconds=44)


def test_over_nccl_flights_are_recorded_first_and_the_device_is_given(world: World) -> None:
    start_process_group(info(), CUDA, environment={})
    assert [call[0] for call in world.calls] == ["atexit", "meet", "record", "init", "TorchCollectives"]
    assert world.named("init")[0][0] == "nccl"
    assert world.named("init")[0][1]["device_id"] == CUDA
    assert world.named("TorchCollectives")[0][0] == CUDA


def test_over_gloo_tensors_are_carried_by_the_cpu(world: World) -> None:
    start_process_group(info(), CUDA, environment={"NCCL_BACKEND": "gloo"})
    assert world.named("record") == []
    assert world.named("init")[0][0] == "gloo"
    assert world.named("init")[0][1]["device_id"] is None
    assert world.named("TorchCollectives")[0][0] == CPU


@pytest.mark.parametrize(
    ("limits", "environment", "seconds"),
    [
        ({}, {}, 960.0),
        ({}, {"NCCL_TIMEOUT": "7"}, 7.0),
        ({"watchdog_first_seconds": 100.0, "watchdog_collective_seconds": 30.0}, {}, 600.0),
        *(({name: 0.0}, {}, 7 * 86400.0) for name in LIMITS),
    ],
)
def test_collectives_that_are_watched_wait_for_as_long_as_the_watch_allows(
    world: World, limits: dict[str, float], environment: dict[str, str], seconds: float
) -> None:
    watched = health(**limits, always=True)
    made: Any = start_process_group(info(), CPU, environment=environment, watched=watched)
    assert world.named("init")[0][1]["timeout"] == timedelta(seconds=seconds)
    assert world.named("client") == [(info(), environment)]
    [(store, activity, options)] = world.named("FingerprintCheck")
    store.set("name", "calls")
    assert PrefixStore("calls", world.another).get("name") == b"calls"
    assert activity is watched.activity is made.activity
    assert options == {"rank": 1, "steps": 4, "always": True}
    assert world.named("TorchCollectives")[0][1].keys() == {"where", "activity", "compare"}


def test_a_backend_that_does_not_start_is_told(world: World) -> None:
    world.fails = "the first line\nthe second"
    with pytest.raises(PeerError) as caught:
        start_process_group(info(), CPU)
    assert (caught.value.problem.code, caught.value.problem.why) == ("launch.group_failed", "the first line")


def test_a_watch_has_a_store_of_its_own_and_is_started(world: World) -> None:
    watched, environment = health(), {"A": "b"}
    start_watch(info(0), watched, environment=environment, scrub=str.upper, beat=0.5)
    assert world.named("client") == [(info(0), environment)]
    assert [call[0] for call in world.calls] == ["client", "Watch", "Watch starts"]
    [(activity, settings, options)] = world.named("Watch")
    assert (activity, settings) == (watched.activity, watched.settings)
    store = options.pop("store")
    store.set("name", "watch")
    assert PrefixStore("watch", world.another).get("name") == b"watch"
    assert options == {"rank": 0, "world_size": 3, "serves_store": True, "scrub": str.upper, "beat": 0.5}


def test_a_watch_over_a_process_alone_has_no_store(world: World) -> None:
    start_watch(ALONE, health(), environment={})
    start_watch(info(1), health(), environment={})
    alone, second = (options for _, _, options in world.named("Watch"))
    assert (alone["store"], alone["serves_store"], alone["world_size"]) == (None, False, 1)
    assert (second["serves_store"], second["rank"]) == (False, 1)
    assert alone["beat"] == BEAT_SECONDS
    assert alone["scrub"]("x") == "x"


@pytest.mark.parametrize(("shares", "left"), [(True, ["their groups", "collect"]), (False, ["destroy", "collect"])])
def test_a_group_that_deepspeed_shares_is_left_with_the_groups_that_it_keeps(
    world: World, monkeypatch: pytest.MonkeyPatch, shares: bool, left: list[str]
) -> None:
    kept = SimpleNamespace(
        is_initialized=lambda: shares, destroy_process_group=lambda: world.calls.append(("their groups",))
    )
    monkeypatch.setitem(sys.modules, "deepspeed.comm", kept)
    world.size = 2
    stop_process_group()
    assert [call[0] for call in world.calls] == left


@pytest.mark.parametrize(("size", "left"), [(0, []), (1, []), (2, ["destroy", "collect"])])
def test_only_a_group_of_several_ranks_is_left(world: World, size: int, left: list[str]) -> None:
    world.size = size
    stop_process_group()
    assert [call[0] for call in world.calls] == left
