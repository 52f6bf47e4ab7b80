"""Whatever an engine is asked in whatever order: no illegal state, nothing served with absent or old weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, ServiceError
from rft_engine.lifecycle import EngineState, StateMachine
from rft_engine.native.engine import NativeEngine
from rft_engine.protocols import DecodableModel
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

VOCAB = 5
OPERATIONS = ("generate", "generate", "sleep", "sleep", "wake", "wake", "update", "crash", "close")


class StubEngine:
    """Only the states: what it generates is the version of the weights that it holds, 0 if it gave them up."""

    def __init__(self, trainer: Trainer) -> None:
        self._states, self._trainer = StateMachine(), trainer
        self._holds: int | None = trainer.version

    @property
    def state(self) -> EngineState:
        return self._states.state

    def generate(self) -> int | None:
        self._states.require_ready("generate")
        self._trainer.crash_if_due()
        return self._holds

    def load_weights(self, version: int) -> None:
        self._states.load_weights(version)
        self._holds = self._trainer.version

    def sleep(self, level: int) -> None:
        if (self._states.sleep(level) and level == 2) or level == 2:
            self._holds = None

    def wake(self) -> None:
        self._states.wake()

    def close(self) -> None:
        self._states.close()


@dataclass
class Trainer:
    """The weights' version, and whether the next forward fails."""

    version: int = 0
    crashes: bool = False

    def crash_if_due(self) -> None:
        if self.crashes:
            self.crashes = False
            raise RuntimeError("device lost")


class VersionedModel(FakeDecodableModel):
    """Whose next token says which version its weights are, once `refresh` has taken them over."""

    trainer: Trainer

    @classmethod
    def of(cls, trainer: Trainer) -> VersionedModel:
        model = cls(torch.zeros(1, VOCAB))
        model.trainer = trainer
        model.refresh()
        return model

    def refresh(self) -> None:
        self.log_SV = torch.full((1, VOCAB), -1e4)
        self.log_SV[0, self.trainer.version % VOCAB] = 0.0

    def step(self, cache: FakeCache, token_ids_B: torch.Tensor) -> torch.Tensor:
        self.trainer.crash_if_due()
        return super().step(cache, token_ids_B)


class NativeUnderTest:
    """The in-process engine with the stub's operations."""

    def __init__(self, trainer: Trainer) -> None:
        model: DecodableModel[FakeCache] = VersionedModel.of(trainer)
        self._engine = NativeEngine(model, max_rows=4, max_len=16)
        self._trainer = trainer

    @property
    def state(self) -> EngineState:
        return self._engine.state

    def generate(self) -> int:
        [[one], [other]] = self._engine.generate(
            [[1], [2, 3]], [[7], [8]], SamplingOptions(temperature=1.0, max_new_tokens=3)
        )
        assert one.weight_version == other.weight_version == self._engine.weight_version
        assert len({*one.token_ids, *other.token_ids}) == 1
        return one.token_ids[0]

    def load_weights(self, version: int) -> None:
        self._engine.load_weights(version)

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()


def run(engine_of: Callable[[Trainer], StubEngine | NativeUnderTest], seed: int, num_operations: int) -> list[str]:
    """One sequence beside a model of three lines: where the engine is, what it holds, what it said."""
    numbers, trainer = random.Random(seed), Trainer()
    engine = engine_of(trainer)
    state, has_weights, served, outcomes = EngineState.READY, True, 0, list[str]()
    for _ in range(num_operations):
        operation = numbers.choice(
            ["generate", "generate", "sleep", "sleep", "wake", "wake", "update", "crash", "close"]
        )
        closed = state is EngineState.CLOSED
        level = numbers.choice([1, 1, 2])
        try:
            if operation == "generate":
                found = engine.generate()
                assert (state, has_weights) == (EngineState.READY, True), "served while asleep or without weights"
                assert found == (served if isinstance(engine, StubEngine) else served % VOCAB), "served old weights"
            elif operation == "sleep":
                engine.sleep(level)
                state, has_weights = EngineState.ASLEEP, has_weights and level == 1
            elif operation == "wake":
                engine.wake()
                state = EngineState.READY
            elif operation == "update":
                trainer.version += 1
                engine.load_weights(trainer.version)
                served, has_weights = trainer.version, True
            elif operation == "crash":
                trainer.crashes = numbers.random() < 0.5
            elif numbers.random() < 0.1:
                engine.close()
                state = EngineState.CLOSED
            outcomes.append(f"{operation}: done")
        except ServiceError:
            assert closed or operation == "generate"
            assert closed or state is EngineState.ASLEEP or not has_weights
            outcomes.append(f"{operation}: refused")
        except RuntimeError:
            assert operation == "generate"
            outcomes.append("generate: crashed")
        assert engine.state is state
    return outcomes


def test_ten_thousand_sequences_against_the_states_alone():
    outcomes = {outcome for seed in range(10_000) for outcome in run(StubEngine, seed, 12)}
    assert outcomes >= {"generate: done", "generate: refused", "generate: crashed", "update: refused", "sleep: done"}


def test_two_hundred_sequences_against_the_in_process_engine():
    outcomes = {outcome for seed in range(200) for outcome in run(NativeUnderTest, seed, 30)}
    assert outcomes >= {"generate: done", "generate: refused", "generate: crashed", "update: refused", "wake: done"}


def test_the_weights_are_gone_even_if_it_slept_already():
    engine = StubEngine(Trainer())
    engine.sleep(1)
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ServiceError, match="were dropped") as caught:
        engine.generate()
    assert caught.value.problem.code == "engine.state"
    with pytest.raises(OptionsError, match="sleep level = 3") as caught:
        engine.sleep(3)
    assert caught.value.problem.code == "engine.sleep.level"
