"""Routers of mixtures of experts: their losses, their choices and their balance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.twins.numbers import ONE, ZERO, Decimal, Row, dec, gradient, mean, row, sigmoid, total

Inputs = Mapping[str, Any]


def softmax(logits: Row) -> Row:
    """exp(x_i) / sum_j exp(x_j)."""
    terms = [x.exp() for x in logits]
    return [term / total(terms) for term in terms]


def sigmoid_shares(logits: Row) -> Row:
    """sigmoid(x_i) / sum_j sigmoid(x_j)."""
    scores = [sigmoid(x) for x in logits]
    return [score / total(scores) for score in scores]


def top(scores: Row, num_choices: int) -> list[int]:
    """The experts with the largest scores."""
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:num_choices]


def biased(logits: Row, bias: Row) -> Row:
    """s_i + b_i, by which experts are chosen."""
    return [sigmoid(x) + b for x, b in zip(logits, bias, strict=True)]


def _balance(inputs: Inputs, choices: list[list[int]], shares: Callable[[Row], Row]) -> dict[str, Any]:
    """E sum_i f_i P_i, with f_i the share of rows that choose i and P_i its mean probability."""
    rows = [row(logits) for logits in inputs["logits"]]
    width = len(rows[0])
    used = [Decimal(sum(expert in chosen for chosen in choices)) / len(rows) for expert in range(width)]

    def loss(flat: Row) -> Decimal:
        probabilities = [shares(flat[start : start + width]) for start in range(0, len(flat), width)]
        return width * total(f * mean([p[expert] for p in probabilities]) for expert, f in enumerate(used))

    flat = [x for logits in rows for x in logits]
    slopes = gradient(loss, flat)
    return {"loss": loss(flat), "gradient": [slopes[start : start + width] for start in range(0, len(flat), width)]}


def load_balancing(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Experts are chosen and weighed by a softmax."""
    return _balance(inputs, [top(row(logits), params["num_choices"]) for logits in inputs["logits"]], softmax)


def sigmoid_load_balancing(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Experts are chosen by a sigmoid and a bias, and weighed by the sigmoids alone."""
    bias = row(inputs["bias"])
    choices = [top(biased(row(logits), bias), params["num_choices"]) for logits in inputs["logits"]]
    return _balance(inputs, choices, sigmoid_shares)


def router_z_loss(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """(log sum_i exp(x_i))^2 of each row, and the gradient of their mean."""
    rows = [row(logits) for logits in inputs["logits"]]

    def loss(logits: Row) -> Decimal:
        return total(x.exp() for x in logits).ln() ** 2

    slopes = [[slope / len(rows) for slope in gradient(loss, logits)] for logits in rows]
    return {"loss": [loss(logits) for logits in rows], "gradient": slopes}


def biased_choice(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1 for the experts of a row that are chosen, else 0."""
    bias, found = row(inputs["bias"]), list[Row]()
    for logits in inputs["logits"]:
        chosen = top(biased(row(logits), bias), params["num_choices"])
        found.append([ONE if expert in chosen else ZERO for expert in range(len(bias))])
    return {"chosen": found}


def balanced_bias(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """b_i + u (sign(mean c - c_i) - mean_j sign(mean c - c_j))."""
    moved = list[Row]()
    for bias, loads in zip(inputs["bias"], inputs["loads"], strict=True):
        counts = row(loads)
        lacks = [mean(counts) - c for c in counts]
        signs = [ONE if lack > 0 else -ONE if lack < 0 else ZERO for lack in lacks]
        moved.append([dec(b) + dec(params["rate"]) * (s - mean(signs)) for b, s in zip(bias, signs, strict=True)])
    return {"bias": moved}


def max_violation(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """(max_i c_i - mean c) / mean c."""
    layers = [row(loads) for loads in inputs["loads"]]
    return {"violation": [(max(loads) - mean(loads)) / mean(loads) for loads in layers]}


def load_entropy(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """-sum_i f_i log f_i / log E, with f_i = c_i / sum c."""
    found: Row = []
    for loads in inputs["loads"]:
        shares = [dec(c) / total(row(loads)) for c in loads]
        found.append(-total(f * f.ln() for f in shares if f) / Decimal(len(shares)).ln())
    return {"entropy": found}


TWINS = {
    "load_balancing": load_balancing,
    "sigmoid_load_balancing": sigmoid_load_balancing,
    "router_z_loss": router_z_loss,
    "biased_choice": biased_choice,
    "balanced_bias": balanced_bias,
    "max_violation": max_violation,
    "load_entropy": load_entropy,
}
