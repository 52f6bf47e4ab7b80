"""Counters against hand-computed scores, and on the real rows against what counting is known to reach."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rft_algos.evaluation.ranking import hit_at_k, ndcg_at_k, rank_of
from rft_genrec.baselines.counters import ItemNeighbours, Popularity, Transitions
from rft_genrec.baselines.recommender import CatalogueScorer
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.catalogue.records import user_sequences

SEQUENCES = [[0, 1, 2], [0, 2], [3, 0, 1]]


def test_popularity_is_the_share_with_one_more_of_each() -> None:
    counter = Popularity(SEQUENCES, 5)
    assert counter.scores([[], [4]]).tolist() == [pytest.approx([n / 13 for n in (4, 3, 3, 2, 1)])] * 2


def test_first_order_transitions_are_those_of_the_last_item() -> None:
    counter = Transitions(SEQUENCES, 5, num_steps=1, decay=0.0, smoothing=0.0, popularity_weight=0.0)
    assert counter.scores([[3, 0]])[0].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0, 0])
    assert counter.scores([[0, 4]])[0].tolist() == [0.0] * 5


def test_steps_are_weighted_by_distance_and_items_by_age() -> None:
    counter = Transitions([[0, 1, 2]], 3, num_steps=2, decay=0.5, smoothing=1.0, popularity_weight=0.0)
    # 0 -> 1 counts 1 and 0 -> 2 counts 1/2; 1 -> 2 counts 1
    of_0, of_1 = np.array([0, 1, 0.5]) / 2.5, np.array([0, 0, 1.0]) / 2
    assert counter.scores([[0, 1]])[0].tolist() == pytest.approx((of_1 + 0.5 * of_0).tolist())


def test_a_history_without_an_item_ranks_by_popularity() -> None:
    counters: list[CatalogueScorer] = [Transitions(SEQUENCES, 5), ItemNeighbours(SEQUENCES, 5)]
    for counter in counters:
        assert counter.rank([[]], 5)[0].items == Popularity(SEQUENCES, 5).rank([[]], 5)[0].items
        assert (counter.scores([[], [0]]) > 0).all()


def test_neighbours_are_those_whom_the_same_people_took() -> None:
    counter = ItemNeighbours(SEQUENCES, 5, popularity_weight=0.0)
    # 0 was taken by three people, 1 and 2 by two of them, 3 by one
    expected = [0, 2 / math.sqrt(6), 2 / math.sqrt(6), 1 / math.sqrt(3), 0]
    assert counter.scores([[0, 0]])[0].tolist() == pytest.approx(expected)


@pytest.mark.data
def test_counting_the_real_rows_reaches_what_it_is_known_to(data_dir: Path) -> None:
    """The table of counters that were fitted on the 4,532 validation rows and scored on the 4,533 test rows."""
    dataset = read_dataset(data_dir / "amazon18-industrial")
    sequences, num = list(user_sequences(dataset.of("valid")).values()), len(dataset.catalogue)
    expected = [
        (Popularity(sequences, num), 0.0682, 0.0472),
        (Transitions(sequences, num, num_steps=1, decay=0.0), 0.1262, 0.0944),
        (Transitions(sequences, num), 0.1381, 0.1006),
    ]
    for counter, hit, gain in expected:
        ranked = counter.rank([sample.history for sample in dataset.of("test")], 10)
        ranks = [rank_of(one.items, sample.target) for one, sample in zip(ranked, dataset.of("test"), strict=True)]
        assert len(ranks) == 4533
        assert np.mean([hit_at_k(rank, k=10) for rank in ranks]) == pytest.approx(hit, abs=0.006)
        assert np.mean([ndcg_at_k(rank, k=10) for rank in ranks]) == pytest.approx(gain, abs=0.004)
