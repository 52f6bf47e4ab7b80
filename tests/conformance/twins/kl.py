"""Estimators of KL(pi || pi_ref) at tokens, and their derivatives with respect to log pi."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.twins.numbers import LIMIT, STEP, Decimal, dec, ratio, slope_between

Inputs = Mapping[str, Any]
Estimator = Callable[[Decimal, Decimal, Decimal], Decimal]
"""(log pi - log pi_ref, the same behind a stop-gradient, log pi - log pi_old) -> estimate."""


def k3_of(x: Decimal) -> Decimal:
    """exp(-x) - 1 + x, with x held at -20 below it."""
    held = max(x, -LIMIT)
    return (-held).exp() - 1 + held


def k1(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """x."""
    return x


def k2(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """x^2 / 2."""
    return x * x / 2


def k3(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """exp(-x) - 1 + x."""
    return k3_of(x)


def absolute(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """|x|."""
    return abs(x)


def straight_through(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """The value of k3 with the gradient of k2."""
    return k3_of(fixed) + (x * x - fixed * fixed) / 2


def unbiased_k3(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """r k3, both with their gradients; where the value is held the gradient is not."""

    def free(at: Decimal, weight: Decimal) -> Decimal:
        return weight * ((-at).exp() - 1 + at)

    weight = ratio(moved - (x - fixed))
    return weight * k3_of(fixed) + free(x, ratio(moved)) - free(fixed, weight)


def importance_weighted_k1(x: Decimal, fixed: Decimal, moved: Decimal) -> Decimal:
    """r x, both with their gradients."""
    return ratio(moved) * x


def with_gradient(estimator: Estimator) -> Any:
    """The twin of an estimator: its values, and their derivatives with respect to log pi."""

    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        values, slopes = [], []
        olds = inputs.get("old_logprobs", inputs["logprobs"])
        for now, reference, old in zip(inputs["logprobs"], inputs["reference_logprobs"], olds, strict=True):
            fixed, moved = dec(now) - dec(reference), dec(now) - dec(old)
            values.append(estimator(fixed, fixed, moved))
            sides = [estimator(fixed + h, fixed, moved + h) for h in (STEP, -STEP)]
            slopes.append(slope_between(*sides))
        return {"value": values, "gradient": slopes}

    return twin


ESTIMATORS: dict[str, Estimator] = {
    estimator.__name__: estimator
    for estimator in (k1, k2, k3, absolute, straight_through, unbiased_k3, importance_weighted_k1)
}
TWINS = {name: with_gradient(estimator) for name, estimator in ESTIMATORS.items()}
