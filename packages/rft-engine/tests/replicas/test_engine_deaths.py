"""E1: replicas that die, stop or fall silent at a drawn instant of any state; nothing is lost, and it is found soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import RftError
from rft_engine.native.engine import NativeEngine
from rft_engine.process.client import EngineDied
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.process import ProcessReplica
from rft_engine.testing.replica_worker import CARRY, COMMAND, table_of
from rft_engine.testing.table_model import FakeDecodableModel
from rft_engine.weight_sync.shared_memory import SharedWeightStore

SECONDS_TO_FIND = 10.0
PROMPTS = [(1,), (2, 3), (4,), (5, 6, 1), (2,), (3, 3)]
KEYS = [[100 * p + s for s in range(3)] for p in range(len(PROMPTS))]
OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=40, stop_token_ids=(0,))
STATES = ("mid-generation", "idle", "in a load", "asleep")


@dataclass
class Found:
    """When replicas were given up, by the clock of the files' times."""

    at: list[float] = field(default_factory=list[float])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Notes when a replica is started again: what was its state is found by then."""
    noted, restart = Found(), ProcessReplica.restart

    def noting(self: ProcessReplica, newest: Callable[[], Any]) -> None:
        noted.at.append(time.time())
        restart(self, newest)

    monkeypatch.setattr(ProcessReplica, "restart", noting)
    return noted


class Weights:
    """What is trained here."""

    def __init__(self) -> None:
        self.table = table_of(0)

    def provider(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table


def expected(seed: int) -> list[list[tuple[int, ...]]]:
    """The tokens that one engine in this process draws."""
    engine = NativeEngine(FakeDecodableModel(table_of(seed), carry=CARRY), max_rows=18, max_len=64)
    return [[one.token_ids for one in group] for group in engine.generate(PROMPTS, KEYS, OPTIONS)]


def tokens(engine: ReplicaEngine) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in group] for group in engine.generate(PROMPTS, KEYS, OPTIONS)]


def pool(path: Path, weights: Weights, models: list[dict[str, Any]]) -> ReplicaEngine:
    """Started replicas, under the limits of production: a short deadline would find what the watch is to find."""
    replicas = [
        ProcessReplica(n, COMMAND, model, max_rows=18, max_len=64, log_path=path / f"{n}.log")
        for n, model in enumerate(models)
    ]
    for replica in replicas:
        replica.ready()
    engine = ReplicaEngine(replicas, SharedWeightStore(weights.provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    return engine


def strike(engine: ReplicaEngine, number: int, trouble: str) -> float:
    """Kill or stop one of the replicas now."""
    replica = engine._replicas[number]  # pyright: ignore[reportPrivateUsage]
    assert isinstance(replica, ProcessReplica)
    os.kill(replica.pid, signal.SIGKILL if trouble == "die" else signal.SIGSTOP)
    return time.time()


def die_in(state: str, trouble: str, draw: Random, path: Path, found: Found) -> float:
    """One death in this state; every sample is there and as without it. Return the seconds until it was found."""
    weights, was = Weights(), path / "was"
    models: list[dict[str, Any]] = [{"pause": 0.01}, {"pause": 0.01}]
    number, seed = draw.randrange(2), 0
    if state == "mid-generation":
        models[number] |= {"trouble": trouble, "trouble_at": draw.randint(1, 12), "marker": str(was)}
    engine = pool(path, weights, models)
    struck = 0.0
    try:
        if state == "idle":
            time.sleep(draw.uniform(0.0, 0.1))
            struck = strike(engine, number, trouble)
        elif state == "in a load":
            weights.table, seed = table_of(1), 1
            struck = strike(engine, number, trouble)
            engine.load_weights(1)
        elif state == "asleep":
            engine.sleep(1)
            struck = strike(engine, number, trouble)
            engine.wake()
        assert tokens(engine) == expected(seed), "none is lost, doubled or another"
        if state == "mid-generation":
            assert was.exists(), "it was not struck"
            struck = was.stat().st_mtime
        # the other one may have drawn everything before it was missed
        if not found.at:
            assert engine._health.wait(number, lambda: False)  # pyright: ignore
        assert tokens(engine) == expected(seed)
    finally:
        engine.close()
    assert found.at, "no replica was given up"
    return found.at[0] - struck


CASES = [(state, trouble) for state in STATES for trouble in ("die", "stop")] + [("mid-generation", "hang")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "limit"),
    [
        # beside other tests the watch itself may wait for a core
        pytest.param(2, 60.0, id="few"),
        pytest.param(54, SECONDS_TO_FIND, id="night", marks=[pytest.mark.night]),
    ],
)
def test_e1_a_death_at_any_instant_is_found_in_time_and_costs_no_sample(
    tmp_path: Path, found: Found, number: int, limit: float
) -> None:
    slowest = 0.0
    for case in range(number):
        state, trouble = CASES[case % len(CASES)]
        found.at.clear()
        folder = tmp_path / f"{case}"
        folder.mkdir()
        seconds = die_in(state, trouble, Random(f"e1 {case}"), folder, found)
        print(f"case {case}: {trouble} {state}: found after {seconds:.1f} s")
        assert seconds < limit, f"case {case}: {trouble} {state}"
        slowest = max(slowest, seconds)
    print(f"E1: {number} of {number} found, the slowest after {slowest:.1f} s")


@pytest.mark.parametrize("trouble", ["die"])
def test_e1_a_replica_that_dies_before_its_engine_is_made_is_an_error_at_once(tmp_path: Path, trouble: str) -> None:
    replica = ProcessReplica(0, COMMAND, {}, max_rows=4, max_len=64, log_path=tmp_path / "0.log")
    os.kill(replica.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RftError) as caught:
        replica.ready()
    assert isinstance(caught.value, EngineDied)
    assert time.monotonic() - started < SECONDS_TO_FIND
    replica.close()
