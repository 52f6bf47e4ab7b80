"""Measures of rankings: against a plain twin on random sets, shared IDs, and rows that are not the samples'."""

from __future__ import annotations

import math
import random

import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.records import Sample, SemanticIds
from rft_genrec.evaluation.measures import Truth, difference, measure, require_same_ids, scored
from rft_genrec.evaluation.rankings import Ranking

IDS = SemanticIds((("<a>",), ("<b>",), ("<b>",), ("<c>",)))
SAMPLES = (Sample("t:0", "u", (0,), 2), Sample("t:1", "v", (3,), 3))


def truth(samples: tuple[Sample, ...] = SAMPLES) -> Truth:
    return Truth(samples, IDS, {0: 3, 3: 1}, 4)


def test_a_hit_on_a_shared_id_counts_half_by_item_and_whole_by_id() -> None:
    beams = [Ranking("t:0", ((1, 2), (0,)), (-1.0, -2.0)), Ranking("t:1", ((0,), (3,)), (-1.0, -2.0))]
    found = measure(beams, truth(), [1, 2]).columns
    assert found["HR@1"] == [0.5, 0.0]
    assert found["HR@2"] == [0.5, 1.0]
    assert found["id HR@1"] == [1.0, 0.0]
    assert found["NDCG@2"] == pytest.approx([0.5, 1 / math.log2(3)])


def test_a_baseline_that_ranks_items_is_measured_by_both() -> None:
    items = [Ranking("t:0", ((1,), (2,)), (2.0, 1.0)), Ranking("t:1", ((1,), (2,)), (2.0, 1.0))]
    found = measure(items, truth(), [1, 2]).columns
    assert found["HR@1"] == [0.0, 0.0]
    assert found["HR@2"] == [1.0, 0.0]
    # both items are one ID, which is the first of the list
    assert found["id HR@1"] == [1.0, 0.0]


def test_what_lists_hold_is_counted() -> None:
    lists = measure([Ranking("t:0", ((0,),), (1.0,)), Ranking("t:1", ((0,),), (1.0,))], truth(), [1]).lists
    assert lists["coverage@10"] == 0.25
    assert lists["novelty@10"] == pytest.approx(-math.log2(4 / 8))
    assert lists["repeats@10"] == 0.5


def test_random_rankings_have_the_measures_of_a_plain_twin() -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        samples = tuple(Sample(f"t:{n}", "u", (), draw.randrange(4)) for n in range(5))
        orders = [draw.sample(range(4), 3) for _ in samples]
        rankings = [
            Ranking(s.sample_id, tuple((i,) for i in order), (3.0, 2.0, 1.0))
            for s, order in zip(samples, orders, strict=True)
        ]
        found = measure(rankings, truth(samples), [2]).columns
        hits = [float(s.target in order[:2]) for s, order in zip(samples, orders, strict=True)]
        gains = [
            1 / math.log2(order.index(s.target) + 2) if s.target in order[:2] else 0.0
            for s, order in zip(samples, orders, strict=True)
        ]
        assert found["HR@2"] == hits
        assert found["NDCG@2"] == pytest.approx(gains, abs=1e-12)


def test_all_methods_have_intervals_of_the_same_resamples() -> None:
    samples = tuple(Sample(f"t:{n}", "u", (), n % 4) for n in range(40))
    rankings = [Ranking(s.sample_id, ((0,),), (1.0,)) for s in samples]
    one = measure(rankings, truth(samples), [1])
    found = scored({"a": one, "b": one}, seed=1, num_draws=50)
    assert found["a"].intervals == found["b"].intervals
    assert found["a"].intervals["HR@1"].estimate == 0.25
    assert found["a"].as_record()["HR@1"]["num"] == 40
    gain = difference(one, one, "HR@1", seed=1, num_draws=50)
    assert (gain.low, gain.high) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (["a"], "1 missing"),
        (["a", "b", "b"], "1 more than once"),
        (["a", "b", "c"], "1 foreign"),
        (["b", "a"], "order"),
    ],
)
def test_rows_that_are_not_the_samples_are_refused(found: list[str], word: str) -> None:
    with pytest.raises(DataError, match=word):
        require_same_ids(found, ["a", "b"])
