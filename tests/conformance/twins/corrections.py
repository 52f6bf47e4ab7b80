"""Corrections for tokens that another policy sampled: weights from log rho = log pi_old - log pi_behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.twins.numbers import ONE, ZERO, Decimal, Row, dec, kept, mean, placed, ratio, total

Inputs = Mapping[str, Any]


def by_sequence(inputs: Inputs, of_row: Callable[[Row], Row]) -> dict[str, Any]:
    """Weights of each sequence's sampled tokens from their log-ratios, 0 elsewhere."""
    rows = []
    for old, behaviour, mask in zip(inputs["old_logprobs"], inputs["behaviour_logprobs"], inputs["mask"], strict=True):
        log_rho = [o - b for o, b in zip(kept(old, mask), kept(behaviour, mask), strict=True)]
        rows.append(placed(of_row(log_rho), mask))
    return {"weights": rows}


def within(value: Decimal, params: Inputs) -> bool:
    """Whether the bounds hold."""
    return dec(params["low"]) <= value <= dec(params["high"])


def truncate_tokens(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """min(rho_t, cap)."""
    return by_sequence(inputs, lambda x: [min(ratio(d), dec(params["cap"])) for d in x])


def truncate_sequences(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """min(product of rho, cap)."""
    return by_sequence(inputs, lambda x: [min(ratio(total(x)), dec(params["cap"]))] * len(x))


def mask_tokens(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """rho_t within bounds, else 0."""
    return by_sequence(inputs, lambda x: [ratio(d) if within(ratio(d), params) else ZERO for d in x])


def mask_sequences(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The product of rho where it is within bounds, else 0."""

    def of_row(x: Row) -> Row:
        product = ratio(total(x))
        return [product if within(product, params) else ZERO] * len(x)

    return by_sequence(inputs, of_row)


def mask_sequences_geometric(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1 where the geometric mean of rho is within bounds, else 0."""
    return by_sequence(inputs, lambda x: [ONE if within(ratio(mean(x)), params) else ZERO] * len(x))


def masked_geometric_with_ratios(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The tokens' own rho, unbounded, in sequences whose geometric mean is within bounds."""
    return by_sequence(inputs, lambda x: [ratio(d) if within(ratio(mean(x)), params) else ZERO for d in x])


def veto_outliers(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1 where no token of the sequence leaves the bounds."""
    return by_sequence(inputs, lambda x: [ONE if all(within(ratio(d), params) for d in x) else ZERO] * len(x))


def off_policy_sequence_mask(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """0 where the advantage is negative and the mean of log pi_behaviour - log pi is above delta."""
    signs = iter([mean(kept(a, m)) for a, m in zip(inputs["advantages"], inputs["mask"], strict=True)])

    def of_row(x: Row) -> Row:
        dropped = next(signs) < 0 and mean([-d for d in x]) > dec(params["delta"])
        return [ZERO if dropped else ONE] * len(x)

    return by_sequence(inputs, of_row)


TWINS = {
    twin.__name__: twin
    for twin in (
        truncate_tokens,
        truncate_sequences,
        mask_tokens,
        mask_sequences,
        mask_sequences_geometric,
        masked_geometric_with_ratios,
        veto_outliers,
        off_policy_sequence_mask,
    )
}
