"""An engine with a process of its own as a replica: what it is asked for reaches the engine, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import Completion
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.replicas.external_engine import ExternalEngineReplica
from rft_engine.weight_sync.shared_images import SharedImage
from rft_engine.weight_sync.shared_memory import SharedWeightStore


class FakeEngine:
    """Keeps what it is asked for."""

    weight_version = 0

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self.calls: list[tuple[str, Any]] = []
        self.loaded: list[float] = []

    def generate(self, *given: Any, **named: Any) -> list[list[Completion]]:
        self.calls.append(("generate", (given, named)))
        return [
            [Completion((key,), (-1.0 * key,), (-0.5,), "stop" if key % 2 else "length", 7) for key in keys]
            for keys in given[1]
        ]

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
    replica.close()  # nothing to close yet
    replica.ready()
    replica.ready()
    assert len(made) == 1
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
    store = SharedWeightStore(lambda: [("w", weight)], torch.float32, num_bytes=1000)  # pyright: ignore[reportArgumentType]
    try:
        replica.load(store.put(1))
        weight.fill_(5.0)
        replica.restart(lambda: store.get(1))
        assert inner.calls == [("load_weights", 1), ("refresh", 1)]
        assert inner.loaded == [1.0, 1.0], "those of the version, not what is trained now"
        replica.load(store.put(2))
        assert inner.loaded[-1] == 5.0
    finally:
        store.close()


@pytest.mark.parametrize("has_images", [True, False])
def test_samples_of_a_prompt_and_its_image_are_one_prompt_of_one_call(
    engine: tuple[ExternalEngineReplica, FakeEngine], has_images: bool
) -> None:
    replica, inner = engine
    assert not replica.can_resume
    assert not replica.reads_files
    options = SamplingOptions(temperature=1.0, max_new_tokens=9)
    prefixes, keys, budgets = [(1,), (2, 3), (1,), (1,), (2, 3)], [10, 11, 12, 13, 14], [5, 6, 7, 8, 9]
    media, shown = ([1, -1, 0, 1, -1], [SharedImage("first"), SharedImage("second")]) if has_images else ([], [])
    found = list(replica.draw(SampleRequests(prefixes, keys, [0] * 5, budgets, options, media, shown)))
    [(name, (given, named))] = inner.calls
    groups = [[0, 3], [1, 4], [2]] if has_images else [[0, 2, 3], [1, 4]]
    assert name == "generate"
    assert given == (
        [list(prefixes[group[0]]) for group in groups],
        [[keys[request] for request in group] for group in groups],
        options,
    )
    assert named == {
        "budgets": [[budgets[request] for request in group] for group in groups],
        "media": ["second", None, "first"] if has_images else None,
        "constraint": None,
    }
    order = [request for group in groups for request in group]
    assert found == [
        SampledTokens(i, (keys[i],), (-1.0 * keys[i],), (-0.5,), "stop" if keys[i] % 2 else "length", 7) for i in order
    ]


def test_samples_that_were_begun_are_not_drawn(engine: tuple[ExternalEngineReplica, FakeEngine]) -> None:
    replica, _ = engine
    options = SamplingOptions(temperature=1.0, max_new_tokens=9)
    with pytest.raises(AssertionError):
        list(replica.draw(SampleRequests([(1,), (1, 2)], [1, 2], [0, 1], [5, 5], options)))
