"""An engine with a process of its own as a replica: what it is asked for reaches the engine, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft_engine.replicas.external_engine import ExternalEngineReplica
from rft_engine.weight_sync.shared_memory import SharedWeightStore


class FakeEngine:
    """Keeps what it is asked for."""

    weight_version = 0

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self.calls: list[tuple[str, Any]] = []
        self.loaded: list[float] = []

    def load_weights(self, version: int) -> None:
        self.weight_version = version
        self.calls.append(("load_weights", version))
        self.loaded.append(float(dict(self.provider())["w"][0]))

    def refresh(self) -> None:
        self.calls.append(("refresh", self.weight_version))
        self.loaded.append(float(dict(self.provider())["w"][0]))

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def wake(self) -> None:
        self.calls.append(("wake", None))

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.fixture
def engine() -> tuple[ExternalEngineReplica, FakeEngine]:
    made: list[FakeEngine] = []
    replica = ExternalEngineReplica(3, lambda provider: made.append(FakeEngine(provider)) or made[0])  # type: ignore[arg-type,return-value]
    return replica, made[0]


def test_sleep_with_its_level_wake_and_close_reach_the_engine(
    engine: tuple[ExternalEngineReplica, FakeEngine],
) -> None:
    replica, inner = engine
    replica.sleep(2)
    replica.wake()
    replica.close()
    assert inner.calls == [("sleep", 2), ("wake", None), ("close", None)]


def test_a_newer_version_is_loaded_and_the_same_one_again_after_a_restart(
    engine: tuple[ExternalEngineReplica, FakeEngine], tmp_path: Path
) -> None:
    replica, inner = engine
    weight = torch.tensor([1.0, 2.0])
    store = SharedWeightStore(lambda: [("w", weight)], torch.float32)  # pyright: ignore[reportArgumentType]
    try:
        replica.load(store.put(1))
        weight.fill_(5.0)
        replica.restart(store.get(1))
        assert inner.calls == [("load_weights", 1), ("refresh", 1)]
        assert inner.loaded == [1.0, 1.0], "those of the version, not what is trained now"
        replica.load(store.put(2))
        assert inner.loaded[-1] == 5.0
    finally:
        store.close()
