"""Measures of ranked lists with one right item a list, and intervals of their means.

Where rows are drawn, the columns are such that every draw gives the same.
"""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source

SOURCES = {
    "rank_of": Source("2510.24431", "the place of the target, counted from 0"),
    "hit_at_k": Source("2510.24431", "HR@K; 1 / n where n items share what was ranked"),
    "ndcg_at_k": Source("Jarvelin and Kekalainen 2002", "cumulated gain with one right item"),
    "coverage": Source("Ge, Delgado-Battenfeld and Jannach 2010", "catalogue coverage"),
    "novelty": Source("Zhou et al. 2010", "self-information, every item counted once more"),
    "resampled_means": Source("Efron 1979", "the same rows for all columns"),
    "bootstrap_intervals": Source("Efron and Tibshirani 1993", "chapter 13, percentiles"),
}
LISTS = [[3, 1, 2], [2, 0, 5, 4], [1]]
RANKS = [0, 2, -1, 3, 1]
"""-1 is a list without its target."""
SHARING = [1, 2, 1, 1, 3]
NUMBERS = Draw(97).numbers(6, 0.0, 1.0)


def case(name: str, label: str, pins: str, inputs: Any, params: Any = None, **more: Any) -> Case:
    """A case of this kind."""
    return Case("ranking", name, label, pins, SOURCES[name], inputs, params or {}, **more)


CASES = (
    case(
        "rank_of",
        "by_hand",
        "counted from 0; a list without its target has none, here -1",
        {"lists": LISTS, "targets": [2, 2, 9]},
        hand={"ranks": ["2", "0", "-1"]},
        arithmetic="third place; first; absent",
    ),
    case(
        "hit_at_k",
        "by_hand",
        "rank k is beyond the first k; a shared place counts for its share",
        {"ranks": RANKS, "sharing": SHARING},
        {"k": 3},
        hand={"hits": ["1", "1/2", "0", "0", "1/3"]},
        arithmetic="ranks 0, 2 and 1 are among the first 3, shared by 1, 2 and 3",
    ),
    case(
        "ndcg_at_k",
        "by_hand",
        "the gain of the first place is 1: log2(rank + 2)",
        {"ranks": [0, 2, -1, 3], "sharing": [1, 2, 1, 1]},
        {"k": 3},
        hand={"gains": ["1", "1/4", "0", "0"]},
        arithmetic="1 / log2 2; 1 / (2 log2 4)",
    ),
    case("ndcg_at_k", "irrational", "log2 3 and log2 5", {"ranks": RANKS, "sharing": SHARING}, {"k": 5}),
    case(
        "coverage",
        "by_hand",
        "each item once, of the first k of any list, over all items",
        {"lists": LISTS},
        {"k": 2, "num_items": 8},
        hand={"share": "1/2"},
        arithmetic="3, 1, 2 and 0 of eight items",
    ),
    case(
        "novelty",
        "by_hand",
        "an item that nobody took has a share, too; bits",
        {"lists": [[0, 1]], "counts": {"0": 2}},
        {"k": 5, "num_items": 2},
        hand={"bits": "1.207518749639421909"},
        arithmetic="shares 3/4 and 1/4: (2 - log2 3 + 2) / 2",
    ),
    case(
        "novelty",
        "places_of_all_lists",
        "a mean over places, not over lists",
        {"lists": LISTS, "counts": {"1": 4, "2": 1}},
        {"k": 3, "num_items": 6},
    ),
    case(
        "resampled_means",
        "paired",
        "all columns are drawn by the same rows, so that a constant difference stays",
        {"columns": [NUMBERS, [round(number + 0.25, 6) for number in NUMBERS]]},
        {"num_draws": 5, "key": 1},
        hand={"differences": ["1/4"] * 5},
        arithmetic="the second column is the first plus 1/4",
    ),
    case(
        "bootstrap_intervals",
        "constant",
        "a column without spread has an interval without width",
        {"columns": [[2.0] * 4, [-0.5] * 4]},
        {"num_draws": 20, "key": 1},
        hand={name: ["2", "-1/2"] for name in ("estimate", "low", "high")},
        arithmetic="every draw is the same number four times",
    ),
)
