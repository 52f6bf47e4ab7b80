"""Losses of a critic."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source, hidden, ones

SOURCES = {
    "squared_value_loss": Source("1707.06347", "equation 9, with the half of most implementations"),
    "clipped_value_loss": Source("2006.05990", "the clip of PPO2"),
    "huber_value_loss": Source("Huber 1964", "robust estimation of a location parameter"),
    "explained_variance": Source("OpenAI Baselines", "explained_variance"),
}
LENGTHS = [4, 3, 5]
OLD = Draw(51).rows(LENGTHS, -1.0, 1.0)
NEW = [
    [v + m for v, m in zip(row, moves, strict=True)]
    for row, moves in zip(OLD, Draw(52).rows(LENGTHS, -0.5, 0.5), strict=True)
]
NEW = [[round(v, 6) for v in row] for row in NEW]
RETURNS = Draw(53).rows(LENGTHS, -1.5, 1.5)
HOLES = [[1, 1, 0, 1], [1, 0, 1], [0, 1, 1, 1, 1]]


def inputs(mask: Any = None, nan: bool = False) -> dict[str, Any]:
    """Values, old values and returns."""
    mask = mask or ones(LENGTHS)
    given = {"values": NEW, "old_values": OLD, "returns": RETURNS}
    return {"mask": mask} | {key: hidden(rows, mask) if nan else rows for key, rows in given.items()}


def cases_of(name: str, params: dict[str, Any]) -> list[Case]:
    """Plain, with observations, and with NaN at them."""
    return [
        Case("value", name, "moved", "both sides of the clip", SOURCES[name], inputs(), params),
        Case("value", name, "masked", "tokens of observations count nowhere", SOURCES[name], inputs(HOLES), params),
        Case(
            "value", name, "masked_nan", "NaN where masked reaches nothing", SOURCES[name], inputs(HOLES, True), params
        ),
    ]


CASES = (
    Case(
        "value",
        "clipped_value_loss",
        "by_hand",
        "the half; the worse of the two; no gradient where the clip decides",
        SOURCES["clipped_value_loss"],
        {"values": [[1.0, 1.0]], "old_values": [[0.0, 0.0]], "returns": [[2.0, 0.5]], "mask": [[1, 1]]},
        {"clip": 0.5},
        hand={"loss": [["9/8", "1/8"]], "total": "5/8", "gradient": [["0", "1/4"]]},
        arithmetic="kept near: 1/2. max(1, 9/4)/2, clipped; max(1/4, 0)/2, free with gradient 1/2; over 2 tokens",
    ),
    Case(
        "value",
        "huber_value_loss",
        "by_hand",
        "the square within delta, its tangent beyond, a gradient of at most delta",
        SOURCES["huber_value_loss"],
        {"values": [[1.0, 3.0, -2.0]], "old_values": [[0.0] * 3], "returns": [[0.5, 0.0, 0.0]], "mask": [[1, 1, 1]]},
        {"delta": 1.0},
        hand={"loss": [["1/8", "5/2", "3/2"]], "total": "11/8", "gradient": [["1/6", "1/3", "-1/3"]]},
        arithmetic="errors 1/2, 3, -2: 1/8, 3 - 1/2, 2 - 1/2; slopes 1/2, 1, -1 over 3 tokens",
    ),
    *cases_of("huber_value_loss", {"delta": 0.4}),
    *cases_of("squared_value_loss", {}),
    *cases_of("clipped_value_loss", {"clip": 0.2}),
    *cases_of("explained_variance", {}),
    Case(
        "value",
        "explained_variance",
        "cut",
        "moments of micro-batches are merged: no cut changes the result",
        SOURCES["explained_variance"],
        inputs(HOLES),
        {"cuts": [[2], [0], [1]]},
    ),
)
