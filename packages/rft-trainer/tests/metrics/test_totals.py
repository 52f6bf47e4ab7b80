"""Means and peaks over micro-batches and ranks, exact whatever the division."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_trainer.metrics.totals import MetricTotals, slowest_rank
from rft_trainer.testing.bigram import OneRank


def test_the_slowest_rank_is_named_with_its_time_over_the_median() -> None:
    assert slowest_rank([1.0, 1.0, 3.0, 2.0]) == {"time/slowest_rank": 2, "time/slowest_rank_ratio": 3.0}
    assert slowest_rank([4.0, 2.0]) == {"time/slowest_rank": 0, "time/slowest_rank_ratio": 2.0}
    assert slowest_rank([1.0]) == slowest_rank([1.0, None]) == slowest_rank([0.0, 0.0]) == {}


def pair(total: float, count: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(total, requires_grad=True), torch.tensor(count)


class Ranks(OneRank):
    """Ranks of which the others sent these shares."""

    world_size = 3

    def __init__(self, *others: MetricTotals) -> None:
        self._others = others

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sent: list[bytes] = []
        for other in self._others:
            own: Any = Ranks()
            own.gather_bytes = lambda data: (sent.append(data), [data])[1]
            other.merged(own)
        return [data, *sent]


def totals(*pairs: dict[str, tuple[float, float]], **peaks: float) -> MetricTotals:
    made = MetricTotals()
    for one in pairs:
        made.add({name: pair(*values) for name, values in one.items()})
    for name, value in peaks.items():
        made.peak(name, torch.tensor(value))
    return made


def test_a_mean_is_of_all_that_was_counted_and_a_peak_the_largest() -> None:
    made = totals({"b": (3.0, 2.0), "a": (1.0, 1.0)}, {"b": (5.0, 6.0), "none": (0.0, 0.0)}, top=-3.0)
    made.peak("top", torch.tensor(-4.0))
    made.peak("top", torch.tensor(-2.0))
    assert made.merged(OneRank()) == {"a": 1.0, "b": 1.0, "top": -2.0}
    assert list(made.merged(OneRank())) == ["a", "b", "top"]


def test_sums_are_exact_where_float32_is_not() -> None:
    made = totals({"x": (2.0**24, 1.0)}, {"x": (1.0, 0.0)}, {"x": (1.0, 0.0)})
    assert made.merged(OneRank()) == {"x": 2.0**24 + 2.0}


def test_ranks_are_added_and_one_that_had_nothing_takes_part() -> None:
    own = totals({"a": (1.0, 2.0)}, top=-5.0)
    other = totals({"a": (5.0, 2.0), "b": (3.0, 1.0)}, top=-7.0, low=-1.0)
    assert own.merged(Ranks(other, totals())) == {"a": 1.5, "b": 3.0, "top": -5.0, "low": -1.0}
    assert totals().merged(Ranks(other)) == {"a": 2.5, "b": 3.0, "top": -7.0, "low": -1.0}


def test_what_is_kept_has_no_graph() -> None:
    value = torch.tensor(1.0, requires_grad=True)
    made = MetricTotals()
    made.peak("top", value * 2)
    made.add({"a": (value * 2, value * 1)})
    assert made.merged(OneRank()) == pytest.approx({"a": 2.0, "top": 2.0})
    json.dumps(made.merged(OneRank()))
