"""95 % intervals for what an evaluation reports. Torch-free.

A mean of n scores uses Student's t with n - 1 degrees of freedom, a share of successes uses
Wilson's interval, a mean of shares either of them, and "after against before" on the same
prompts uses the paired differences, whose interval is much narrower than the two separate ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from rft_algos.input_checks import refuse


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its confidence interval.

    Example: `Interval(estimate=0.5, low=0.24, high=0.76, num=10)`.
    """

    estimate: float
    low: float
    high: float
    num: int
    """How many observations it rests on."""


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """mean +- t_{n-1} * s / sqrt(n), s with Bessel's correction.

    Args:
        values: n >= 1 independent observations (a plain sequence, no tensors).
        level: coverage, in (0, 1).

    Returns:
        The interval; from minus to plus infinity for one observation, which says nothing of spread.
    """
    num = len(values)
    if not num >= 1:
        refuse("an interval needs at least one observation")
    # fsum is exact, so the order of the scores does not matter
    mean = math.fsum(values) / num
    if num == 1:
        return Interval(mean, -math.inf, math.inf, num)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    half = student_quantile(0.5 + level / 2, num - 1) * math.sqrt(variance / num)
    return Interval(mean, mean - half, mean + half, num)


def paired_difference_interval(before: Sequence[float], after: Sequence[float], *, level: float = 0.95) -> Interval:
    """`mean_interval` of after_i - before_i, for two measurements of the same n items.

    Args:
        before: n scores (a plain sequence, no tensors).
        after: n scores of the same items in the same order.
        level: coverage, in (0, 1).

    Returns:
        The interval of the mean difference; positive means that `after` is larger.
    """
    if len(before) != len(after):
        refuse(f"pairs need two equal lengths: {len(before)} against {len(after)}")
    return mean_interval([b - a for a, b in zip(before, after, strict=True)], level=level)


def wilson_interval(successes: int, num: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share, which stays inside [0, 1] and is sound at 0 and n.

    centre = (p + z^2 / 2n) / (1 + z^2 / n),
    half width = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2).

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    Args:
        successes: how many of `num` succeeded (plain integers, no tensors).
        num: trials, at least 1.
        level: coverage, in (0, 1).

    Returns:
        The interval, with estimate successes / num.
    """
    if not num >= 1:
        refuse("an interval needs at least one observation")
    if not 0 <= successes <= num:
        refuse(f"{successes} successes of {num} trials")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, shrink = successes / num, 1.0 + z * z / num
    centre = (share + z * z / (2 * num)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    # exact at both ends, where the formula leaves a rounding error
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == num else min(1.0, centre + half)
    return Interval(share, low, high, num)


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Predictions whose probability is in [low, high), the last bin with its upper end."""

    low: float
    high: float
    num: int
    predicted: float
    """Mean predicted probability."""
    observed: float
    """Share of them that came true."""


def calibration_curve(
    probabilities: Sequence[float], came_true: Sequence[bool], *, num_bins: int = 10, low: float = 0.0
) -> list[CalibrationBin]:
    """Compare predicted probabilities with what was observed, in bins of equal width from `low` to 1.

    Bins without a prediction are left out.

    Source: DeGroot and Fienberg 1983, "The comparison and evaluation of forecasters".

    Args:
        probabilities: of n predictions, in [low, 1] (plain sequences, no tensors).
        came_true: whether each came true.
        num_bins: bins of the whole range, at least 1.
        low: lower end; 0.5 for the probability of the more probable of two outcomes.
    """
    if len(probabilities) != len(came_true):
        refuse(f"{len(probabilities)} probabilities for {len(came_true)} outcomes")
    if num_bins < 1 or not 0 <= low < 1:
        refuse(f"{num_bins} bins from {low}")
    if any(not low <= probability <= 1 for probability in probabilities):
        refuse(f"a probability outside [{low:g}, 1]")
    width = (1 - low) / num_bins
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for index, probability in enumerate(probabilities):
        members[min(int((probability - low) / width), num_bins - 1)].append(index)
    return [
        CalibrationBin(
            low=low + (1 - low) * number / num_bins,
            high=low + (1 - low) * (number + 1) / num_bins,
            num=len(chosen),
            predicted=math.fsum(probabilities[index] for index in chosen) / len(chosen),
            observed=sum(came_true[index] for index in chosen) / len(chosen),
        )
        for number, chosen in enumerate(members)
        if chosen
    ]


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Expected calibration error: sum_b (n_b / n) |predicted_b - observed_b|.

    Source: Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian binning", as Guo et al. 2017
    (arXiv 1706.04599), equation 3, use it.

    Args:
        bins: of `calibration_curve`, at least one (plain numbers, no tensors).

    Returns:
        The error, in [0, 1].
    """
    total = sum(one.num for one in bins)
    if not total:
        refuse("a calibration error needs at least one prediction")
    return math.fsum(one.num * abs(one.predicted - one.observed) for one in bins) / total


def share_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Interval of the mean of n values in [0, 1], one an independent item: shares, chances, right or wrong.

    Wilson's where all are 0 or 1 (so that no spread is not taken for certainty), else `mean_interval` cut to [0, 1].

    Args:
        values: n >= 1 values (a plain sequence, no tensors).
        level: coverage, in (0, 1).

    Returns:
        The interval, inside [0, 1].
    """
    if not all(0.0 <= value <= 1.0 for value in values):
        refuse("a share lies in [0, 1]")
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson_interval(int(sum(values)), len(values), level=level)
    found = mean_interval(values, level=level)
    return Interval(found.estimate, max(0.0, found.low), min(1.0, found.high), found.num)


def pass_at_k_estimate(num_correct: int, num: int, *, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, drawn without replacement, hold a correct one.

    Unbiased for the chance that one of k fresh samples is correct, unlike 1 - (1 - c / n)^k.

    Source: Chen et al. 2021, "Evaluating large language models trained on code" (arXiv 2107.03374), equation 1.

    Args:
        num_correct: c, how many of the n samples are correct (plain integers, no tensors).
        num: n, at least k.
        k: how many samples are drawn, at least 1.

    Returns:
        The estimate, in [0, 1]. Example: 1 of 4 with k = 2 gives 1 - 3/6 = 0.5.
    """
    if not 1 <= k <= num:
        refuse(f"k = {k} of {num} samples")
    if not 0 <= num_correct <= num:
        refuse(f"{num_correct} correct ones of {num} samples")
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def best_of_k_estimate(values: Sequence[float], *, k: int) -> float:
    """Mean of the largest of k values over all draws of k of the n values without replacement.

    With the values in ascending order, sum over i of x_i * C(i - 1, k - 1) / C(n, k): in so many draws x_i is the
    largest. Unbiased for the best of k fresh samples; for values of 0 and 1 it is `pass_at_k_estimate`.

    Args:
        values: n values (a plain sequence, no tensors).
        k: how many are drawn, in [1, n].

    Returns:
        The estimate, in the unit of the values. Example: 0, 1, 5 with k = 2 give (1 + 2 * 5) / 3.
    """
    num = len(values)
    if not 1 <= k <= num:
        refuse(f"k = {k} of {num} values")
    draws = math.comb(num, k)
    return math.fsum(value * (math.comb(below, k - 1) / draws) for below, value in enumerate(sorted(values)))


def student_quantile(probability: float, degrees: int) -> float:
    """The t with P(T <= t) = probability for Student's distribution of integer degrees of freedom.

    Bisection on the exact finite series up to 200 degrees, the expansion around the normal
    quantile above, where its error is below 1e-9. No tensors.

    Source: Abramowitz and Stegun, 26.7.3, 26.7.4 (series) and 26.7.5 (expansion).

    Args:
        probability: in [0.5, 1).
        degrees: degrees of freedom, at least 1.

    Returns:
        The quantile.
    """
    if not 0.5 <= probability < 1.0:
        refuse(f"probability {probability} outside [0.5, 1)")
    if not degrees >= 1:
        refuse(f"{degrees} degrees of freedom")
    if degrees > 200:
        return _student_quantile_near_normal(NormalDist().inv_cdf(probability), degrees)
    low, high = 0.0, 1.0
    # doubled until the quantile is inside, which may be far out with one degree of freedom
    while _student_within(high, degrees) < 2 * probability - 1:
        low, high = high, 2 * high
    # until no floating-point number lies between the two
    while (middle := (low + high) / 2) not in (low, high):
        if _student_within(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return middle


def _student_within(t: float, degrees: int) -> float:
    """Compute the probability P(|T| <= t)."""
    theta = math.atan(t / math.sqrt(degrees))
    cos_squared = math.cos(theta) ** 2
    if degrees == 1:
        return 2 * theta / math.pi
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = term
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cos_squared
        total += term
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total


def _student_quantile_near_normal(z: float, degrees: int) -> float:
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
