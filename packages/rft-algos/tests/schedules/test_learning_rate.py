from __future__ import annotations

import math

import pytest

from rft_algos.schedules.learning_rate import constant, warmup_cosine, warmup_linear, warmup_stable_decay

SHAPE = {"num_steps": 10, "warmup_steps": 3, "peak": 2.0, "floor_ratio": 0.1}
decaying = pytest.mark.parametrize("schedule", [warmup_cosine, warmup_linear])


@decaying
def test_warm_up_is_linear_wastes_no_step_and_meets_the_peak(schedule):
    assert [schedule(step, **SHAPE) for step in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_hand_computed_cosine_and_line():
    # step 5 is 2/7 of the way, the floor is 0.2
    assert warmup_cosine(5, **SHAPE) == pytest.approx(0.2 + 1.8 * (1 + math.cos(2 * math.pi / 7)) / 2)
    assert warmup_linear(5, **SHAPE) == pytest.approx(0.2 + 1.8 * 5 / 7)
    half = {"num_steps": 8, "warmup_steps": 0, "peak": 1.0, "floor_ratio": 0.0}
    assert warmup_cosine(4, **half) == pytest.approx(0.5)
    assert warmup_linear(4, **half) == pytest.approx(0.5)


@decaying
def test_the_floor_is_reached_at_the_end_and_kept(schedule):
    assert [schedule(step, **SHAPE) for step in (10, 11, 1000)] == pytest.approx([0.2, 0.2, 0.2])
    assert schedule(9, **SHAPE) > 0.2


@decaying
def test_after_the_peak_the_rate_never_rises(schedule):
    rates = [schedule(step, **SHAPE) for step in range(3, 12)]
    assert rates == sorted(rates, reverse=True)


@decaying
def test_a_floor_at_the_peak_is_the_constant_schedule(schedule):
    for step in range(12):
        flat = schedule(step, num_steps=10, warmup_steps=3, peak=2.0, floor_ratio=1.0)
        assert flat == pytest.approx(constant(step, peak=2.0, warmup_steps=3))


@decaying
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(0, 0), (1, 0), (1, 1), (3, 5), (1, 9)])
def test_runs_shorter_than_their_warm_up_stay_within_bounds(schedule, num_steps: int, warmup_steps: int):
    shape = {"num_steps": num_steps, "warmup_steps": warmup_steps, "peak": 1.0, "floor_ratio": 0.0}
    rates = [schedule(step, **shape) for step in range(num_steps)]
    assert all(0 < rate <= 1 for rate in rates)


def test_constant_is_the_peak():
    assert [constant(step, peak=0.3) for step in (0, 1, 10**6)] == [0.3, 0.3, 0.3]


@pytest.mark.parametrize("warmup_steps", [0, 2, 6, 48])
@pytest.mark.parametrize("peak", [0.1, 3e-5, 0.7])
def test_the_peak_is_met_to_the_last_digit(peak: float, warmup_steps: int):
    # 0.1 * 3 / 3 is not 0.1: after the warm-up nothing is multiplied by its length any more
    for schedule in (warmup_cosine, warmup_linear):
        assert schedule(warmup_steps, num_steps=100, warmup_steps=warmup_steps, peak=peak, floor_ratio=0.0) == peak
    assert constant(warmup_steps, peak=peak, warmup_steps=warmup_steps) == peak


@decaying
def test_a_run_that_ends_with_its_warm_up_is_over_at_the_floor(schedule):
    shape = {"num_steps": 3, "warmup_steps": 3, "peak": 2.0, "floor_ratio": 0.1}
    assert [schedule(step, **shape) for step in (2, 3, 4)] == pytest.approx([1.5, 0.2, 0.2])


def wsd(step: int, *, num_steps: int = 20, warmup_steps: int = 3, decay_steps: int = 5) -> float:
    return warmup_stable_decay(
        step,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        peak=0.3,
        floor_ratio=0.1,
    )


def test_a_stable_rate_rises_stays_and_falls_in_its_last_steps() -> None:
    assert [wsd(step) for step in range(3)] == pytest.approx([0.075, 0.15, 0.225])
    assert {wsd(step) for step in range(3, 16)} == {0.3}
    # a fifth of the way from 0.3 to 0.03 a step, the floor one after the last
    assert [wsd(step) for step in range(16, 22)] == pytest.approx([0.246, 0.192, 0.138, 0.084, 0.03, 0.03])


def test_a_longer_run_has_the_same_stable_rates() -> None:
    assert [wsd(step) for step in range(15)] == [wsd(step, num_steps=1000) for step in range(15)]


@pytest.mark.parametrize("decay_steps", [17, 20, 90])
def test_a_decay_of_the_rest_of_the_run_is_the_linear_schedule_and_leaves_the_warm_up(decay_steps: int) -> None:
    line = [warmup_linear(step, num_steps=20, warmup_steps=3, peak=0.3, floor_ratio=0.1) for step in range(22)]
    assert [wsd(step, decay_steps=decay_steps) for step in range(22)] == line


def test_no_decay_is_the_peak_until_the_run_is_over() -> None:
    assert [wsd(step, decay_steps=0, warmup_steps=0) for step in (0, 19, 20)] == pytest.approx([0.3, 0.3, 0.03])
