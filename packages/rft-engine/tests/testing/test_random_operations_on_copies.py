"""Random operations on an engine with weights of its own, beside a model of a few lines."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.copied_table_model import CARRY, FakeCopy, TablePolicy, table_of
from rft_engine.testing.table_model import FakeDecodableModel

OPERATIONS = ("generate", "generate", "generate", "step", "load", "load", "break", "sleep", "wake", "wake", "refresh")


class Played:
    """One engine, and what it should be: awake or not, and the weights that it may serve."""

    def __init__(self, seed: int) -> None:
        self.numbers, self.policy, self.twin = random.Random(seed), TablePolicy(), FakeCopy()
        self.engine = NativeEngineOnCopy(self.twin, self.policy.provider, max_rows=4, max_len=16)
        self.awake, self.served = True, None

    def play(self, operation: str) -> str:
        """Do it; returns what came of it."""
        getattr(self, f"do_{operation}")()
        return operation

    def do_generate(self) -> None:
        if not self.awake or self.served is None:
            with pytest.raises(ServiceError):
                draw(self.engine)
            return
        expected = NativeEngine(FakeDecodableModel(self.served, carry=CARRY), max_rows=4, max_len=16)
        assert draw(self.engine) == draw(expected)

    def do_step(self) -> None:
        self.policy.step(self.numbers.randrange(1000))

    def do_load(self) -> None:
        self.engine.load_weights(self.engine.weight_version + 1)
        self.served = table_of(self.policy.tensors)

    def do_refresh(self) -> None:
        self.engine.refresh()
        self.served = table_of(self.policy.tensors)

    def do_break(self) -> None:
        version = self.engine.weight_version
        lost = self.numbers.choice(["columns", "bias"])
        self.policy.step(self.numbers.randrange(1000))
        if self.numbers.random() < 0.5:
            self.policy.fails_after = self.numbers.randrange(3)
        else:
            self.twin.loses = {lost}
        with pytest.raises((OSError, ServiceError)):
            self.engine.load_weights(version + 1)
        assert self.engine.weight_version == version
        self.policy.fails_after, self.twin.loses, self.served = None, set(), None

    def do_sleep(self) -> None:
        level = self.numbers.choice([1, 1, 2])
        self.engine.sleep(level)
        self.awake = False
        self.served = self.served if level == 1 else None
        assert level == 1 or not self.twin.held, "level 2 keeps nothing"

    def do_wake(self) -> None:
        self.engine.wake()
        self.awake = True


def draw(engine: NativeEngine) -> list[tuple[int, ...]]:
    found = engine.generate([[1, 2], [3]], [[11, 12], [13]], SamplingOptions(temperature=1.0, max_new_tokens=3))
    return [completion.token_ids for row in found for completion in row]


def test_two_hundred_sequences_serve_nothing_absent_old_or_half() -> None:
    done = Counter[str]()
    for seed in range(200):
        played = Played(seed)
        for _ in range(20):
            done[played.play(played.numbers.choice(OPERATIONS))] += played.awake and played.served is not None
    assert done["generate"] > 200, "enough of them were served"
