"""Losses of a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.twins.numbers import Decimal, clip, dec, gradient, kept, mean, placed, total

Inputs = Mapping[str, Any]


def squared(value: Decimal, old: Decimal, ret: Decimal, params: Inputs) -> Decimal:
    """(V - G)^2 / 2."""
    return (value - ret) ** 2 / 2


def huber(value: Decimal, old: Decimal, ret: Decimal, params: Inputs) -> Decimal:
    """The square within delta of the return, and its tangent beyond."""
    delta, far = dec(params["delta"]), abs(value - ret)
    return far * far / 2 if far <= delta else delta * (far - delta / 2)


def clipped(value: Decimal, old: Decimal, ret: Decimal, params: Inputs) -> Decimal:
    """The larger of that and the same of the value kept near the old one."""
    width = dec(params["clip"])
    near = clip(value, old - width, old + width)
    return max(squared(value, old, ret, params), squared(near, old, ret, params))


def _twin(loss: Any) -> Any:
    def twin(inputs: Inputs, params: Inputs) -> dict[str, Any]:
        columns = [
            [v for values, mask in zip(inputs[key], inputs["mask"], strict=True) for v in kept(values, mask)]
            for key in ("values", "old_values", "returns")
        ]
        losses = [loss(*tokens, params) for tokens in zip(*columns, strict=True)]

        def mean_loss(values: list[Decimal]) -> Decimal:
            return mean([loss(*tokens, params) for tokens in zip(values, *columns[1:], strict=True)])

        found = {"loss": iter(losses), "gradient": iter(gradient(mean_loss, columns[0]))}
        rows = {
            key: [placed([next(rest) for m in mask if m], mask) for mask in inputs["mask"]]
            for key, rest in found.items()
        }
        return {**rows, "total": mean(losses)}

    return twin


def explained_variance(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1 - Var(G - V) / Var(G) over the sampled tokens."""
    returns, values = (
        [v for row, mask in zip(inputs[key], inputs["mask"], strict=True) for v in kept(row, mask)]
        for key in ("returns", "values")
    )
    left = [g - v for g, v in zip(returns, values, strict=True)]
    spreads = [total((v - mean(column)) ** 2 for v in column) for column in (left, returns)]
    return {"explained": 1 - spreads[0] / spreads[1]}


TWINS = {
    "squared_value_loss": _twin(squared),
    "clipped_value_loss": _twin(clipped),
    "huber_value_loss": _twin(huber),
    "explained_variance": explained_variance,
}
