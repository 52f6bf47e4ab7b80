from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, ServiceError
from rft_engine.lifecycle import EngineState, StateMachine
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel


def new_engine() -> NativeEngine[FakeCache]:
    return NativeEngine(FakeDecodableModel(torch.zeros(3, 3)), max_rows=4, max_len=16)


def generate(engine: NativeEngine[FakeCache]) -> None:
    engine.generate([[1]], [[0, 1]], SamplingOptions(temperature=1.0, max_new_tokens=3))


def test_sleeping_twice_and_waking_twice_is_harmless():
    engine = new_engine()
    engine.sleep()
    engine.sleep()
    assert engine.state is EngineState.ASLEEP
    engine.wake()
    engine.wake()
    assert engine.state is EngineState.READY
    generate(engine)


def test_every_transition_is_remembered_with_its_outcome():
    states = StateMachine()
    states.sleep(1)
    states.sleep(1)
    states.wake()
    states.wake()
    states.refresh()
    assert [transition.outcome for transition in states.history] == ["done", "ignored", "done", "ignored", "done"]
    assert states.history[-1].operation == "refresh"


def test_generating_asleep_names_the_state_and_who_put_it_there():
    engine = new_engine()
    engine.sleep()
    with pytest.raises(ServiceError, match=r"generate.*asleep") as caught:
        generate(engine)
    assert caught.value.problem.code == "engine.state"
    assert "sleep(level=1) ready->asleep done at " in caught.value.problem.where
    assert "test_lifecycle.py:" in caught.value.problem.where
    assert caught.value.problem.do == "wake()"


def test_the_message_holds_the_last_five_transitions():
    engine = new_engine()
    for _ in range(4):
        engine.sleep()
        engine.wake()
    engine.close()
    with pytest.raises(ServiceError, match="closed") as caught:
        generate(engine)
    assert caught.value.problem.code == "engine.state"
    where = caught.value.problem.where
    assert where.count("->") == 5
    assert where.index("close ready->closed") < where.index("generate closed->closed refused")


@pytest.mark.parametrize("operation", ["sleep", "wake", "generate", "load_weights"])
def test_nothing_but_closing_again_works_on_a_closed_engine(operation: str):
    engine = new_engine()
    engine.close()
    engine.close()
    calls = {
        "sleep": lambda: engine.sleep(),
        "wake": lambda: engine.wake(),
        "generate": lambda: generate(engine),
        "load_weights": lambda: engine.load_weights(1),
    }
    with pytest.raises(ServiceError, match="closed") as caught:
        calls[operation]()
    assert caught.value.problem.code == "engine.state"


def test_level_two_refuses_generation_until_weights_are_loaded_again():
    engine = new_engine()
    engine.load_weights(3)
    engine.sleep(level=2)
    engine.wake()
    with pytest.raises(ServiceError, match="ready") as caught:
        generate(engine)
    assert caught.value.problem.code == "engine.state"
    assert caught.value.problem.do == "load_weights(4)"
    engine.load_weights(4)
    generate(engine)


def test_a_refresh_serves_the_present_weights_under_their_version():
    table = torch.zeros(3, 3)
    engine = NativeEngine(FakeDecodableModel(table), max_rows=4, max_len=16)
    engine.load_weights(4)
    for asleep in (False, True):
        if asleep:
            engine.sleep(2)
        engine.refresh()
        assert engine.weight_version == 4
    engine.wake()
    generate(engine)
    engine.load_weights(5)
    engine.close()
    with pytest.raises(ServiceError, match=r"refresh.*closed") as caught:
        engine.refresh()
    assert caught.value.problem.code == "engine.state"


def test_a_refresh_derives_the_models_weights_again():
    class Model(FakeDecodableModel):
        times = 0

        def refresh(self) -> None:
            self.times += 1

    model = Model(torch.zeros(3, 3))
    engine = NativeEngine(model, max_rows=4, max_len=16)
    engine.refresh()
    assert model.times == 1


def test_an_unknown_level_of_sleep_is_refused():
    engine = new_engine()
    with pytest.raises(OptionsError, match="sleep level = 3") as caught:
        engine.sleep(level=3)
    assert caught.value.problem.code == "engine.sleep.level"
    generate(engine)


@pytest.mark.parametrize("version", [2, 1, 0, -5])
def test_weight_versions_must_increase(version: int):
    engine = new_engine()
    engine.load_weights(2)
    with pytest.raises(ServiceError, match=f"version {version} were offered") as caught:
        engine.load_weights(version)
    assert caught.value.problem.code == "engine.weights.not_newer"
    assert engine.weight_version == 2


OPERATIONS = ("sleep1", "sleep2", "wake", "generate", "load", "load_old", "close")


def run_sequence(operations: list[str]) -> None:
    """Every operation against a model of three flags: what it says must be what the engine does."""
    engine, closed, asleep, has_weights, version = new_engine(), False, False, True, 0
    for operation in operations:
        allowed = not closed or operation == "close"
        if operation == "generate":
            allowed = allowed and not asleep and has_weights
        elif operation == "load_old":
            allowed = False
        try:
            apply(engine, operation, version)
        except ServiceError:
            assert not allowed, f"{operation} was refused in {operations}"
            continue
        assert allowed, f"{operation} was accepted in {operations}"
        asleep = {"sleep1": True, "sleep2": True, "wake": False}.get(operation, asleep)
        has_weights = {"sleep2": False, "load": True}.get(operation, has_weights)
        closed = closed or operation == "close"
        version += operation == "load"
        assert engine.weight_version == version


def apply(engine: NativeEngine[FakeCache], operation: str, version: int) -> None:
    if operation == "generate":
        generate(engine)
    elif operation.startswith("sleep"):
        engine.sleep(level=int(operation[-1]))
    elif operation.startswith("load"):
        engine.load_weights(version + (operation == "load"))
    elif operation == "wake":
        engine.wake()
    else:
        engine.close()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(OPERATIONS), max_size=25))
def test_any_sequence_of_operations_is_obeyed_or_refused(operations: list[str]):
    run_sequence(operations)


def test_ten_thousand_operations_never_generate_asleep():
    chooser = random.Random(0)
    for _ in range(100):
        run_sequence(chooser.choices(OPERATIONS[:-1], k=100))
