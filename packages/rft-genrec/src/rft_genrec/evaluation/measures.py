"""Measures of the rankings of one method, row by row, and their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rft_algos.evaluation.bootstrap import bootstrap_intervals
from rft_algos.evaluation.ranking import coverage, hit_at_k, ndcg_at_k, novelty, rank_of
from rft_algos.statistics import Interval
from rft_core.errors import DataError
from rft_core.keyed_random import derive_key
from rft_genrec.catalogue.records import Sample, SemanticIds
from rft_genrec.evaluation.rankings import Ranking

LIST_PLACES = 10
"""Places that coverage, novelty and the share of repeats look at."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What rankings are measured against."""

    samples: Sequence[Sample]
    ids: SemanticIds | None
    """None where the catalogue has none: items are then their own IDs."""
    counts: Mapping[int, int]
    """How often each item was taken in what the baselines are fitted on."""
    num_items: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of one method."""

    columns: dict[str, list[float]]
    """One number a row under each name: HR@K and NDCG@K of items, `id HR@K` and `id NDCG@K` of semantic IDs."""
    lists: dict[str, float]
    """Coverage, novelty (bits) and the share of repeats of the first places."""


@dataclass(frozen=True, slots=True)
class MethodScores:
    """Measures of one method with 95 % intervals."""

    intervals: dict[str, Interval]
    lists: dict[str, float]

    def as_record(self) -> dict[str, Any]:
        """Return them as JSON."""
        return {name: asdict(one) for name, one in self.intervals.items()} | self.lists


def measure(rankings: Sequence[Ranking], truth: Truth, ks: Sequence[int]) -> Measured:
    """Measure rankings, which are those of the samples in their order.

    A place that n items share counts 1 / n for an item, and 1 for its ID.

    Raises:
        DataError: the rankings are not those of the samples.
    """
    require_same_ids([one.sample_id for one in rankings], [sample.sample_id for sample in truth.samples])
    names = [f"{level}{name}@{k}" for level in ("", "id ") for name in ("HR", "NDCG") for k in ks]
    columns: dict[str, list[float]] = {name: [] for name in names}
    for ranking, sample in zip(rankings, truth.samples, strict=True):
        place, sharing = _item_place(ranking, sample.target)
        by_id = _id_place(ranking, sample.target, truth.ids)
        for k in ks:
            columns[f"HR@{k}"].append(hit_at_k(place, k=k, num_sharing=sharing))
            columns[f"NDCG@{k}"].append(ndcg_at_k(place, k=k, num_sharing=sharing))
            columns[f"id HR@{k}"].append(hit_at_k(by_id, k=k))
            columns[f"id NDCG@{k}"].append(ndcg_at_k(by_id, k=k))
    return Measured(columns, _lists(rankings, truth))


def scored(measured: Mapping[str, Measured], *, seed: int, num_draws: int) -> dict[str, MethodScores]:
    """Return the intervals of all methods, from the same resamples of the rows."""
    names = [(method, name) for method, one in measured.items() for name in one.columns]
    columns = [measured[method].columns[name] for method, name in names]
    found = bootstrap_intervals(columns, key=derive_key(seed, "ranking_bootstrap"), num_draws=num_draws)
    intervals: dict[str, dict[str, Interval]] = {method: {} for method in measured}
    for (method, name), one in zip(names, found, strict=True):
        intervals[method][name] = one
    return {method: MethodScores(intervals[method], one.lists) for method, one in measured.items()}


def difference(after: Measured, before: Measured, name: str, *, seed: int, num_draws: int) -> Interval:
    """Return the paired interval of a measure of one method over that of another."""
    pairs = [a - b for a, b in zip(after.columns[name], before.columns[name], strict=True)]
    return bootstrap_intervals([pairs], key=derive_key(seed, "ranking_bootstrap"), num_draws=num_draws)[0]


def require_same_ids(found: Sequence[str], expected: Sequence[str]) -> None:
    """Raise `DataError` unless both are the same ids in the same order, each once; the error names the first ones."""
    if list(found) == list(expected):
        return
    counted, wanted = Counter(found), Counter(expected)
    missing = [one for one in wanted if one not in counted]
    foreign = [one for one in counted if one not in wanted]
    twice = [one for one, num in counted.items() if num > 1]
    parts = [
        f"{len(ids)} {word} ({', '.join(ids[:3])})"
        for word, ids in (("missing", missing), ("foreign", foreign), ("more than once", twice))
        if ids
    ]
    raise DataError(
        code="genrec.other_rows",
        what=f"the rankings are not those of the {len(expected)} samples: {'; '.join(parts) or 'another order'}",
        where="sample ids",
        why="a measure over fewer, more or other rows is another measure",
        state="no result was written",
        do="the same command again: it ranks what is missing",
    )


def _item_place(ranking: Ranking, target: int) -> tuple[int | None, int]:
    for place, items in enumerate(ranking.places):
        if target in items:
            return place, len(items)
    return None, 1


def _id_place(ranking: Ranking, target: int, ids: SemanticIds | None) -> int | None:
    if ids is None:
        return _item_place(ranking, target)[0]
    ranked = dict.fromkeys(ids.tokens_by_item[items[0]] for items in ranking.places)
    return rank_of(list(ranked), ids.tokens_by_item[target])


def _lists(rankings: Sequence[Ranking], truth: Truth) -> dict[str, float]:
    k, lists = LIST_PLACES, [one.items(LIST_PLACES) for one in rankings]
    repeats = [
        sum(item in sample.history for item in items) / len(items)
        for items, sample in zip(lists, truth.samples, strict=True)
        if items
    ]
    return {
        f"coverage@{k}": coverage(lists, k=k, num_items=truth.num_items),
        f"novelty@{k}": novelty(lists, truth.counts, k=k, num_items=truth.num_items),
        f"repeats@{k}": sum(repeats) / len(repeats) if repeats else 0.0,
    }
