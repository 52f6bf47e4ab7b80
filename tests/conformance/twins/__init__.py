"""What the papers' arithmetic gives, in decimals of 50 digits: no torch, and nothing of what is tested.

One function an equation, written with lists and loops. Gradients are not derived: every loss is a
function of the log-probabilities and of a frozen copy of them (the stop-gradient of the papers), and
is differentiated by central differences, whose error at 50 digits is below 1e-25.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import localcontext
from typing import Any

from conformance.twins import (
    advantages,
    aggregation,
    corrections,
    kl,
    preference,
    quantisation,
    ranking,
    router,
    shaping,
    surrogates,
    tokens,
    value,
)
from conformance.twins.numbers import PRECISION, as_float

Twin = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""(inputs, parameters) -> results by name, in decimals."""

TWINS: dict[str, dict[str, Twin]] = {
    "advantage": advantages.TWINS | tokens.TWINS,
    "aggregation": aggregation.TWINS,
    "correction": corrections.TWINS,
    "kl": kl.TWINS,
    "preference": preference.TWINS,
    "quantisation": quantisation.TWINS,
    "ranking": ranking.TWINS,
    "router": router.TWINS,
    "shaping": shaping.TWINS,
    "surrogate": surrogates.TWINS,
    "value": value.TWINS,
}


def expected(kind: str, name: str, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a case, rounded to the nearest float at the very end."""
    return computed(TWINS[kind][name], inputs, params)


def computed(twin: Twin, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The results of any twin, at full precision until the last rounding."""
    with localcontext() as context:
        context.prec = PRECISION
        return {key: as_float(found) for key, found in twin(inputs, params).items()}
