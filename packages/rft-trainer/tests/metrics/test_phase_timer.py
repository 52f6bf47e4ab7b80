"""Every second belongs to one phase."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_trainer.metrics.phase_timer import Phase, PhaseTimer


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_shares_and_rates_of_a_step() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase(Phase.ROLLOUT):
        clock.now += 6
    clock.now += 1
    with timer.phase(Phase.TRAIN):
        clock.now += 2
    with timer.phase(Phase.ROLLOUT):
        clock.now += 1
    metrics = timer.step(num_samples=50, num_tokens=4000)
    assert (metrics["time/step"], metrics["time/rollout"], metrics["time/train"]) == (10, 7, 2)
    assert (metrics["time/other"], metrics["time/eval"], metrics["time/share_rollout"]) == (1, 0, 0.7)
    assert (metrics["time/samples_per_minute"], metrics["time/tokens_per_second"]) == (300, 400)
    clock.now += 4
    assert timer.step(num_samples=1, num_tokens=1)["time/other"] == 4


def test_an_inner_phase_takes_its_seconds_from_the_outer() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase(Phase.TRAIN):
        clock.now += 1
        with timer.phase(Phase.SYNC):
            clock.now += 2
        clock.now += 4
    metrics = timer.step(num_samples=1, num_tokens=1)
    assert (metrics["time/train"], metrics["time/sync"], metrics["time/other"]) == (5, 2, 0)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(Phase), st.floats(0, 100), st.floats(0, 100)), max_size=20))
def test_phases_and_the_rest_sum_to_the_step(parts: list[tuple[Phase, float, float]]) -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    for phase, inside, outside in parts:
        with timer.phase(phase):
            clock.now += inside
        clock.now += outside
    metrics = timer.step(num_samples=1, num_tokens=1)
    total = sum(metrics[f"time/{name}"] for name in (*Phase, "other"))
    assert total == pytest.approx(metrics["time/step"], abs=1e-9)


def test_a_phase_that_raises_is_charged_and_left() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        clock.now += 3
        raise KeyError

    with pytest.raises(KeyError), timer.phase(Phase.REWARD):
        fail()
    assert timer.step(num_samples=0, num_tokens=0)["time/reward"] == 3


def test_work_that_a_device_still_does_belongs_to_the_phase_that_asked_for_it() -> None:
    clock = Clock()
    queued = [0.0]

    def synchronize() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    timer = PhaseTimer(clock=clock, synchronize=synchronize)
    with timer.phase(Phase.TRAIN):
        queued[0] = 5
    with timer.phase(Phase.SAVE):
        clock.now += 1
    metrics = timer.step(num_samples=1, num_tokens=1)
    assert (metrics["time/train"], metrics["time/save"]) == (5, 1)


def test_a_step_without_time_has_no_rates_and_a_step_inside_a_phase_is_an_error() -> None:
    timer = PhaseTimer(clock=Clock())
    assert "time/tokens_per_second" not in timer.step(num_samples=1, num_tokens=1)
    with timer.phase(Phase.EVAL), pytest.raises(ValueError, match="inside eval"):
        timer.step(num_samples=1, num_tokens=1)


class Listener:
    """Notes what it is told, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.told: list[tuple[float, str | None]] = []

    def enter_phase(self, name: str | None) -> None:
        self.told.append((self.clock.now, name))

    def end_step(self) -> None:
        self.told.append((self.clock.now, "end of step"))


def test_a_listener_is_told_of_every_phase_and_of_the_end_of_a_step() -> None:
    clock = Clock()
    listener = Listener(clock)
    timer = PhaseTimer(clock=clock, listener=listener)
    with timer.phase(Phase.TRAIN):
        clock.now += 1
        with timer.phase(Phase.SYNC):
            clock.now += 2
        clock.now += 4
    timer.step(num_samples=1, num_tokens=1)
    assert listener.told == [(100, "train"), (101, "sync"), (103, "train"), (107, None), (107, "end of step")]


def test_a_listener_is_told_that_a_phase_which_raised_is_over() -> None:
    clock = Clock()
    listener = Listener(clock)
    timer = PhaseTimer(clock=clock, listener=listener)
    with pytest.raises(KeyError), timer.phase(Phase.SAVE):
        raise KeyError
    assert [name for _, name in listener.told] == ["save", None]
    timer.step(num_samples=1, num_tokens=1)


def test_a_device_is_not_waited_for_after_an_error() -> None:
    waits: list[None] = []
    timer = PhaseTimer(clock=Clock(), synchronize=lambda: waits.append(None))
    with pytest.raises(KeyError), timer.phase(Phase.SAVE):
        raise KeyError
    assert len(waits) == 1, "at the beginning alone"
    with timer.phase(Phase.SAVE):
        pass
    assert len(waits) == 3


def test_a_step_begins_with_nothing_from_the_one_before() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase(Phase.EVAL):
        clock.now += 3
    timer.step(num_samples=1, num_tokens=1)
    clock.now += 1
    with timer.phase(Phase.DATA):
        clock.now += 1
    metrics = timer.step(num_samples=2, num_tokens=3)
    assert {name: metrics[f"time/{name}"] for name in ("step", "eval", "data", "other")} == {
        "step": 2,
        "eval": 0,
        "data": 1,
        "other": 1,
    }
    assert (metrics["time/samples_per_minute"], metrics["time/tokens_per_second"]) == (60, 1.5)
    assert metrics["time/share_other"] == 0.5


def test_a_step_without_samples_has_rates_of_0() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    clock.now += 2
    metrics = timer.step(num_samples=0, num_tokens=0)
    assert (metrics["time/samples_per_minute"], metrics["time/tokens_per_second"]) == (0, 0)


def test_rounding_leaves_nothing_below_0() -> None:
    moments = iter([0.0, 0.0, 0.1, 0.1, 0.3, 0.3, 0.6, 0.6, 0.7, 0.7])
    timer = PhaseTimer(clock=lambda: next(moments))
    for phase in (Phase.DATA, Phase.TRAIN, Phase.SYNC, Phase.EVAL):
        with timer.phase(phase):
            pass
    assert timer.step(num_samples=1, num_tokens=1)["time/other"] >= 0.0


def test_a_step_of_half_a_second_has_rates_too() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    clock.now += 0.5
    metrics = timer.step(num_samples=2, num_tokens=3)
    assert (metrics["time/samples_per_minute"], metrics["time/tokens_per_second"]) == (240, 6)
    assert metrics["time/share_other"] == 1.0


def test_work_is_what_was_not_waited_for_other_ranks() -> None:
    clock, waited = Clock(), Clock()
    timer = PhaseTimer(clock=clock, waited=waited)
    clock.now += 5
    waited.now += 2
    assert timer.worked() == 3
    clock.now += 1
    assert timer.worked() == 1
