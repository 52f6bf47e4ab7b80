"""Starting several engine replicas at once: what one failure or an interrupt leaves behind."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft.build import replicas
from rft.build.replicas import _full_bytes, _start_together
from rft.settings import RlSettings
from rft_engine.settings import ReplicaSettings
from rft_models.settings import ModelSettings

SECONDS = 60.0
"""How long a thread may take that has nothing to do: reached only where the test fails."""


class FakeReplica:
    """A replica that notes when it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        """End it."""
        self.closed.set()


def test_all_that_start_are_handed_out_in_their_order() -> None:
    replicas = [FakeReplica() for _ in range(3)]
    second_is_ready = threading.Event()

    def start(number: int) -> Any:
        if number == 0:
            assert second_is_ready.wait(SECONDS)
        if number == 1:
            second_is_ready.set()
        return replicas[number]

    started: list[Any] = []
    _start_together(start, 3, started)
    assert started == replicas


def test_those_that_start_beside_one_that_fails_are_handed_out_for_closing() -> None:
    good = FakeReplica()

    def start(number: int) -> Any:
        if number == 1:
            raise MemoryError(number)
        return good

    started: list[Any] = []
    with pytest.raises(MemoryError):
        _start_together(start, 2, started)
    assert started == [good]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Turn SIGINT into KeyboardInterrupt, whatever the process that runs the tests does with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_leaves_no_replica_that_becomes_ready_later() -> None:
    quick, slow = FakeReplica(), FakeReplica()
    interrupted = threading.Event()
    quick_thread: Queue[threading.Thread] = Queue()

    def start(number: int) -> Any:
        if number == 0:
            quick_thread.put(threading.current_thread())
            return quick
        quick_thread.get(timeout=SECONDS).join(SECONDS)
        _thread.interrupt_main()
        assert interrupted.wait(SECONDS)
        return slow

    started: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        _start_together(start, 2, started)
    interrupted.set()
    assert slow.closed.wait(SECONDS)
    assert started == [quick]
    assert not quick.closed.is_set(), "who called closes what was handed out"


@pytest.mark.parametrize(("local_world_size", "threads"), [(None, 2), ("2", 4)])
def test_replicas_share_the_cores_of_their_own_machine(
    local_world_size: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(replicas, "usable_cores", lambda: 24)
    monkeypatch.setattr(replicas, "ProcessReplica", lambda number, worker, model, **_: made.append(model))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_world_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    settings: Any = RlSettings(model=ModelSettings(pretrain="m"), replicas=ReplicaSettings(engine_replicas=3))
    machine: Any = SimpleNamespace(device="cpu", ranks=SimpleNamespace(world_size=4))
    replicas._native(settings, machine, 0, "m", 8, Path("log"), {}, torch.float32)
    assert made[0]["num_threads"] == threads


def test_room_for_weights_is_that_of_full_tensors_where_a_rank_keeps_parts() -> None:
    whole, in_parts = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(0))
    marked: Any = in_parts
    marked.ds_numel = 12
    policy: Any = SimpleNamespace(base_parameters=lambda: [("a", whole), ("b", in_parts)])
    assert _full_bytes(policy, torch.float32) == 72
    assert _full_bytes(policy, torch.bfloat16) == 36
