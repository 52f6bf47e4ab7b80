"""Measures of ranked lists, and means of rows that are drawn where every draw gives the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.twins.numbers import ONE, ZERO, Decimal, Row, dec, mean, row

Inputs = Mapping[str, Any]


def log2(value: Any) -> Decimal:
    """ln x / ln 2."""
    return dec(value).ln() / Decimal(2).ln()


def rank_of(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Places from 0, -1 for none."""
    pairs = zip(inputs["lists"], inputs["targets"], strict=True)
    return {"ranks": [ranked.index(target) if target in ranked else -1 for ranked, target in pairs]}


def _hits(inputs: Inputs, params: Inputs) -> Row:
    pairs = zip(inputs["ranks"], inputs["sharing"], strict=True)
    return [ONE / sharing if 0 <= rank < params["k"] else ZERO for rank, sharing in pairs]


def hit_at_k(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1 / n among the first k."""
    return {"hits": _hits(inputs, params)}


def ndcg_at_k(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The hit over log2(rank + 2)."""
    pairs = zip(_hits(inputs, params), inputs["ranks"], strict=True)
    return {"gains": [hit / log2(rank + 2) if hit else ZERO for hit, rank in pairs]}


def coverage(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Distinct items over all."""
    items = {item for ranked in inputs["lists"] for item in ranked[: params["k"]]}
    return {"share": Decimal(len(items)) / params["num_items"]}


def novelty(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The mean of -log2((count + 1) / (all counts + items)) over all places."""
    counts, num_items = inputs["counts"], params["num_items"]
    whole = sum(counts.values()) + num_items
    places = [item for ranked in inputs["lists"] for item in ranked[: params["k"]]]
    return {"bits": mean([-log2(Decimal(counts.get(str(item), 0) + 1) / whole) for item in places])}


def resampled_means(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The constant difference of the last column and the first, once a draw."""
    first, *_, last = (row(column) for column in inputs["columns"])
    return {"differences": [mean([b - a for a, b in zip(first, last, strict=True)])] * params["num_draws"]}


def bootstrap_intervals(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Constant columns: one number is the mean and both ends."""
    assert all(len(set(column)) == 1 for column in inputs["columns"])
    means = [mean(row(column)) for column in inputs["columns"]]
    return {"estimate": means, "low": means, "high": means}


TWINS = {
    "rank_of": rank_of,
    "hit_at_k": hit_at_k,
    "ndcg_at_k": ndcg_at_k,
    "coverage": coverage,
    "novelty": novelty,
    "resampled_means": resampled_means,
    "bootstrap_intervals": bootstrap_intervals,
}
