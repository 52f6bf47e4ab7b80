from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.schedules.controllers import AdaptiveKl, EntropyTarget

POSITIVE = st.floats(1e-3, 1e3)


def test_adaptive_kl_by_hand():
    # 12 / 6 - 1 = 1, clipped to 0.2, times 1000 / 10,000
    assert AdaptiveKl(0.1, target=6.0).updated(12.0, 1000).coefficient == pytest.approx(0.102, rel=1e-12)
    # 3 / 6 - 1 = -0.5, clipped to -0.2
    assert AdaptiveKl(0.1, target=6.0).updated(3.0, 1000).coefficient == pytest.approx(0.098, rel=1e-12)
    # 6.6 / 6 - 1 = 0.1, not clipped, times 500 / 2000
    found = AdaptiveKl(0.1, 6.0, horizon=2000).updated(6.6, 500)
    assert found == AdaptiveKl(pytest.approx(0.1025, rel=1e-12), 6.0, 2000)  # type: ignore[arg-type]
    assert AdaptiveKl(0.1, 6.0).updated(6.0, 1000).coefficient == 0.1
    assert AdaptiveKl(0.1, 6.0).horizon == 10_000
    # small numbers are allowed: 0.55 / 0.5 - 1 = 0.1, times 1 / 0.5
    assert AdaptiveKl(0.1, 0.5, horizon=0.5).updated(0.55, 1).coefficient == pytest.approx(0.12, rel=1e-12)


@given(POSITIVE, POSITIVE, st.floats(-10, 1e4), st.integers(0, 5000))
def test_adaptive_kl_equals_a_plain_twin(coefficient: float, target: float, kl: float, num_samples: int):
    error = kl / target - 1
    error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
    found = AdaptiveKl(coefficient, target, 10_000).updated(kl, num_samples)
    assert found.coefficient == pytest.approx(coefficient * (1 + error * num_samples / 10_000), rel=1e-12)
    assert (found.target, found.horizon) == (target, 10_000)


def test_adaptive_kl_finds_the_coefficient_that_holds_its_target():
    controller = AdaptiveKl(0.01, target=5.0)
    for _ in range(2000):  # a policy whose divergence falls with the coefficient: 1 / beta
        controller = controller.updated(1.0 / controller.coefficient, 1000)
    assert controller.coefficient == pytest.approx(0.2, rel=1e-6)


def test_entropy_target_by_hand():
    controller = EntropyTarget(0.01, target=0.2)
    assert (controller.step, controller.maximum) == (0.005, 1.0)
    assert controller.updated(0.1).coefficient == pytest.approx(0.015, rel=1e-12)
    assert controller.updated(0.3).coefficient == pytest.approx(0.005, rel=1e-12)
    assert controller.updated(0.2) is controller
    assert EntropyTarget(0.003, 0.2).updated(0.3).coefficient == 0.0
    assert EntropyTarget(0.3, 0.2, step=0.5, maximum=0.7).updated(0.1) == EntropyTarget(0.7, 0.2, 0.5, 0.7)
    assert [controller.applied(h) for h in (0.1, 0.2, 0.200001)] == [0.01, 0.01, 0.0]


@given(st.floats(0, 1), st.floats(0, 0.3), st.lists(st.floats(0, 2), max_size=30))
def test_entropy_target_equals_a_plain_twin_and_stays_within_its_bounds(
    coefficient: float, step: float, entropies: list[float]
):
    controller, expected = EntropyTarget(coefficient, 0.7, step, 1.0), coefficient
    for entropy in entropies:
        controller = controller.updated(entropy)
        if entropy != 0.7:
            expected = min(1.0, max(0.0, expected + (step if entropy < 0.7 else -step)))
        assert controller.coefficient == expected
        assert controller.applied(entropy) == (expected if entropy <= 0.7 else 0.0)


@pytest.mark.parametrize("record", [AdaptiveKl(0.1, 6.0), EntropyTarget(0.1, 0.2)])
def test_the_state_is_the_record_and_goes_through_json(record: object):
    fields = dataclasses.asdict(record)  # type: ignore[call-overload]
    assert all(isinstance(value, float | int) for value in fields.values())
    assert type(record)(**json.loads(json.dumps(fields))) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.coefficient = 1.0  # type: ignore[attr-defined]


def test_numbers_that_make_no_sense_are_refused():
    for build, text in (
        (lambda: AdaptiveKl(0.1, 0.0), "target must be positive, it is 0.0"),
        (lambda: AdaptiveKl(0.1, 1.0, 0.0), "horizon must be positive, it is 0.0"),
        (lambda: AdaptiveKl(0.1, 1.0).updated(math.nan, 1), "kl must be finite, it is nan"),
        (lambda: EntropyTarget(0.1, 1.0, -0.1), "step must not be negative, it is -0.1"),
        (lambda: EntropyTarget(-0.1, 1.0), "-0.1 is not within 0 and 1.0"),
        (lambda: EntropyTarget(1.1, 1.0), "1.1 is not within 0 and 1.0"),
        (lambda: EntropyTarget(0.1, 1.0).updated(math.inf), "entropy must be finite, it is inf"),
    ):
        with pytest.raises(InputError, match=text):
            build()
    assert EntropyTarget(1.0, 1.0, step=0.0, maximum=1.0).updated(0.0).coefficient == 1.0
