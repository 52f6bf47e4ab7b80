"""Decimals of 50 digits: what a twin needs of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

PRECISION = 50
"""Significant digits. A float has 17, so that no sum, quotient or exponential of a case loses one of them."""

ZERO, ONE, TWO = Decimal(0), Decimal(1), Decimal(2)
LIMIT = Decimal(20)
"""Log-ratios are clamped to +-20 before exp wherever one is, here and in most trainers."""
STEP = Decimal("1e-16")
"""Of central differences: an error of about 1e-32 times the third derivative."""
NOISE = Decimal("1e-25")
"""Slopes below this are those of a flat place."""
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")

Row = list[Decimal]
Rows = list[Row]


def dec(value: float | int | bool | str) -> Decimal:
    """The exact value of a float, an integer or a text."""
    return Decimal(value)


def row(values: Iterable[Any]) -> Row:
    """Exact values of a list."""
    return [dec(value) for value in values]


def as_float(value: Any) -> Any:
    """The nearest float of every decimal in nested lists."""
    if isinstance(value, list):
        return [as_float(item) for item in value]
    return value if isinstance(value, bool) else float(value)


def total(values: Iterable[Decimal]) -> Decimal:
    """The sum, 0 of nothing."""
    return sum(values, ZERO)


def mean(values: Sequence[Decimal]) -> Decimal:
    """The mean, 0 of nothing."""
    return total(values) / len(values) if values else ZERO


def std(values: Sequence[Decimal], ddof: int = 1) -> Decimal:
    """sqrt(sum (v - mean)^2 / (n - ddof)), 0 where that divides by nothing."""
    if len(values) <= ddof:
        return ZERO
    centre = mean(values)
    return (total((v - centre) ** 2 for v in values) / (len(values) - ddof)).sqrt()


def clip(value: Decimal, low: Decimal, high: Decimal) -> Decimal:
    """The value kept in [low, high]."""
    return min(max(value, low), high)


def ratio(log_ratio: Decimal) -> Decimal:
    """exp(clip(x, -20, 20))."""
    return clip(log_ratio, -LIMIT, LIMIT).exp()


def sigmoid(value: Decimal) -> Decimal:
    """1 / (1 + exp(-x))."""
    return ONE / (ONE + (-value).exp())


def softplus(value: Decimal) -> Decimal:
    """log(1 + exp(x)) = -log sigmoid(-x)."""
    return (ONE + value.exp()).ln()


def cosine(angle: Decimal) -> Decimal:
    """cos by its series, for angles up to about pi."""
    term, result, n = ONE, ONE, 0
    while abs(term) > Decimal("1e-55"):
        n += 2
        term = -term * angle * angle / (n * (n - 1))
        result += term
    return result


def gradient(function: Callable[[Row], Decimal], point: Row) -> Row:
    """Central differences of a function of several numbers."""
    slopes: Row = []
    for i, value in enumerate(point):
        above = function([*point[:i], value + STEP, *point[i + 1 :]])
        below = function([*point[:i], value - STEP, *point[i + 1 :]])
        slopes.append(slope_between(above, below))
    return slopes


def slope_between(above: Decimal, below: Decimal) -> Decimal:
    """The central difference of two values one step to either side; what is below its error is 0."""
    found = (above - below) / (2 * STEP)
    return found if abs(found) > NOISE else ZERO


def kept(values: Sequence[Any], mask: Sequence[Any]) -> Row:
    """What stands where the mask is set; what stands elsewhere is not even read."""
    return [dec(value) for value, m in zip(values, mask, strict=True) if m]


def placed(values: Sequence[Decimal], mask: Sequence[Any]) -> Row:
    """The inverse of `kept`: 0 where masked."""
    rest = iter(values)
    return [next(rest) if m else ZERO for m in mask]


def by_group(groups: Sequence[int]) -> dict[int, list[int]]:
    """The places of each group."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return places
