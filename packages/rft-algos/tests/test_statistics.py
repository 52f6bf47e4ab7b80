from __future__ import annotations

import itertools
import math
import random
from statistics import NormalDist

import pytest

from rft_algos import statistics
from rft_algos.input_checks import InputError
from rft_algos.statistics import (
    calibration_curve,
    calibration_error,
    mean_interval,
    paired_difference_interval,
    student_quantile,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # two-sided 95 % points of Student's t, from the printed tables
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (5, 2.57058),
        (10, 2.22814),
        (29, 2.04523),
        (120, 1.97993),
        (1000, 1.96234),
        (10**9, 1.95996),
    ],
)
def test_student_quantiles_are_those_of_the_tables(degrees: int, quantile: float):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=3e-6)


def test_series_and_expansion_agree_where_they_meet():
    series, expansion = student_quantile(0.975, 200), student_quantile(0.975, 201)
    assert 0 < series - expansion < 1e-4
    assert student_quantile(0.975, 200) == pytest.approx(1.971896224, abs=1e-8)
    assert student_quantile(0.5, 7) == pytest.approx(0.0, abs=1e-12)


def test_hand_computed_mean_interval():
    # mean 3, s = sqrt(2.5), half width 2.776445 * sqrt(2.5 / 5)
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (interval.estimate, interval.num) == (3.0, 5)
    assert interval.high - 3.0 == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-6)
    assert 3.0 - interval.low == pytest.approx(interval.high - 3.0)


def test_one_observation_says_nothing_and_equal_ones_have_no_width():
    one = mean_interval([0.7])
    assert (one.estimate, one.low, one.high, one.num) == (0.7, -math.inf, math.inf, 1)
    same = mean_interval([0.5, 0.5, 0.5])
    assert (same.low, same.high) == (0.5, 0.5)


def test_a_higher_level_is_wider():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert mean_interval(values, level=0.99).low < mean_interval(values).low < mean_interval(values, level=0.5).low


def test_paired_differences_are_after_minus_before():
    interval = paired_difference_interval([1.0, 2.0, 3.0], [2.0, 3.5, 4.0])
    assert interval == mean_interval([1.0, 1.5, 1.0])
    assert interval.estimate > 0


def test_pairing_is_narrower_than_two_separate_intervals():
    generator = random.Random(0)
    before = [generator.gauss(0, 1) for _ in range(50)]
    after = [value + 0.1 + generator.gauss(0, 0.01) for value in before]
    paired = paired_difference_interval(before, after)
    assert paired.low > 0.09
    assert paired.high - paired.low < (mean_interval(before).high - mean_interval(before).low) / 20


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(InputError, match="equal lengths"):
        paired_difference_interval([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("successes", "num", "low", "high"),
    # worked from the quadratic by hand with z = 1.959964
    [(0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (5, 10, 0.236593, 0.763407), (1, 1, 0.206549, 1.0)],
)
def test_wilson_intervals(successes: int, num: int, low: float, high: float):
    interval = wilson_interval(successes, num)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=2e-6)
    assert interval.estimate == successes / num


def test_wilson_ends_solve_the_score_equation():
    z = NormalDist().inv_cdf(0.975)
    for successes, num in [(3, 17), (40, 41), (500, 1319)]:
        interval = wilson_interval(successes, num)
        for end in (interval.low, interval.high):
            assert abs(successes / num - end) == pytest.approx(z * math.sqrt(end * (1 - end) / num), rel=1e-9)


def test_the_mean_interval_covers_the_truth_about_95_times_in_100():
    generator = random.Random(1)
    hits = 0
    for _ in range(1000):
        interval = mean_interval([generator.gauss(2.0, 3.0) for _ in range(6)])
        hits += interval.low <= 2.0 <= interval.high
    assert 930 <= hits <= 970


def test_a_share_just_below_one_has_an_upper_end_of_at_most_one():
    # the sum of centre and half width rounds to 1 + 2^-52 here
    assert wilson_interval(4961181975950448, 4961181975950449).high == 1.0


@pytest.mark.parametrize("probability", [0.4, 1.0, 1.05])
def test_probabilities_without_a_quantile_are_refused(probability: float):
    for degrees in (3, 300):
        with pytest.raises(InputError, match="outside"):
            student_quantile(probability, degrees)


def test_from_201_degrees_on_the_quantile_is_the_expansion():
    expansions = [statistics._student_quantile_near_normal(NormalDist().inv_cdf(0.975), n) for n in (200, 201, 202)]
    exact, first, second = (student_quantile(0.975, n) for n in (200, 201, 202))
    assert (first, second) == (expansions[1], expansions[2])
    assert 0 < abs(exact - expansions[0]) < 2e-9


def test_hand_computed_expansion():
    # 26.7.5 at x = 2: 10 / 4 = 2.5, 294 / 96 = 3.0625, 1098 / 384 = 2.859375, over n, n^2 and n^3
    assert statistics._student_quantile_near_normal(2.0, 1) == 2 + 2.5 + 3.0625 + 2.859375
    assert statistics._student_quantile_near_normal(2.0, 2) == 2 + 2.5 / 2 + 3.0625 / 4 + 2.859375 / 8
    # at x = 1: 2 / 4, 24 / 96 and 24 / 384; with x = 2 this fixes every coefficient
    assert statistics._student_quantile_near_normal(1.0, 4) == 1 + 0.5 / 4 + 0.25 / 16 + 0.0625 / 64


@pytest.mark.parametrize("degrees", [1, 2, 3, 8, 9, 57, 200])
def test_the_quantile_has_its_probability_to_the_last_digits(degrees: int):
    # Simpson's rule on the density, 4000 steps: its error is below 1e-11
    t = student_quantile(0.975, degrees)
    log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    density = [math.exp(log_norm - (degrees + 1) / 2 * math.log1p((t * i / 4000) ** 2 / degrees)) for i in range(4001)]
    inside = t / 4000 / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
    assert inside == pytest.approx(0.475, abs=1e-10)


def all_draws(values: list[float], k: int) -> list[float]:
    return [max(draw) for draw in itertools.combinations(values, k)]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_the_mean_over_all_draws_of_k(k: int):
    values = [0.5, -1.0, 3.0, 0.5, 2.0]
    draws = all_draws(values, k)
    assert statistics.best_of_k_estimate(values, k=k) == pytest.approx(sum(draws) / len(draws))
    for correct in range(6):
        shares = all_draws([1.0] * correct + [0.0] * (5 - correct), k)
        assert statistics.pass_at_k_estimate(correct, 5, k=k) == pytest.approx(sum(shares) / len(shares))


def test_hand_computed_pass_at_k():
    assert statistics.pass_at_k_estimate(1, 4, k=2) == 0.5
    assert statistics.best_of_k_estimate([5.0, 0.0, 1.0], k=2) == pytest.approx(11 / 3)


@pytest.mark.parametrize(("correct", "num", "k"), [(1, 4, 0), (1, 4, 5), (5, 4, 2), (-1, 4, 2)])
def test_draws_that_cannot_be_made_are_refused(correct: int, num: int, k: int):
    with pytest.raises(InputError):
        statistics.pass_at_k_estimate(correct, num, k=k)
    if not 1 <= k <= num:
        with pytest.raises(InputError):
            statistics.best_of_k_estimate([0.0] * num, k=k)


def test_a_calibration_curve_compares_what_was_predicted_with_what_was_observed() -> None:
    bins = calibration_curve([0.5, 0.54, 0.9, 0.94, 1.0], [True, False, True, True, True], low=0.5)
    assert [(one.num, one.observed) for one in bins] == [(2, 0.5), (2, 1.0), (1, 1.0)]
    ends = [(0.5, 0.55), (0.9, 0.95), (0.95, 1.0)]
    assert [(one.low, one.high) for one in bins] == [pytest.approx(end) for end in ends]
    assert [one.predicted for one in bins] == [pytest.approx(mean) for mean in (0.52, 0.92, 1.0)]
    assert calibration_error(bins) == pytest.approx((2 * 0.02 + 2 * 0.08 + 0) / 5)


def test_a_curve_takes_probabilities_of_its_range_alone() -> None:
    with pytest.raises(InputError):
        calibration_curve([0.4], [True], low=0.5)
    with pytest.raises(InputError):
        calibration_curve([0.4, 0.5], [True])
    with pytest.raises(InputError):
        calibration_error([])


def test_the_interval_of_shares_is_wilsons_of_right_and_wrong_and_students_else():
    assert statistics.share_interval([1.0, 0.0, 1.0]) == wilson_interval(2, 3)
    assert statistics.share_interval([1.0] * 5).low < 1.0
    shares = [0.5, 0.25, 0.75, 0.5]
    assert statistics.share_interval(shares) == mean_interval(shares)
    wide = statistics.share_interval([0.5, 1.0])
    assert (wide.low, wide.high, wide.num) == (0.0, 1.0, 2)
    with pytest.raises(InputError):
        statistics.share_interval([1.5])
