"""Terms of the reward against values by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rft_algos.advantages.group_relative import group_norm
from rft_genrec.rewards.terms import collaborative, prefix, ranking, rule, semantic

TARGET = ("a", "b", "c")
MISS = ("x", "y", "z")


def group_of(size: int, hit: int | None) -> list[tuple[str, ...]]:
    return [TARGET if place == hit else MISS for place in range(size)]


def test_ranking_of_sixteen() -> None:
    values = ranking(group_of(16, 3), TARGET)
    assert values[:4] == pytest.approx([-0.1638, -0.1033, -0.0819, 0.0], abs=5e-5)
    assert values[15] == pytest.approx(-0.0401, abs=5e-5)
    assert sum(ranking(group_of(16, 3), TARGET)) > -1.0


def test_advantages_of_rule_and_ranking_are_those_of_minionerec() -> None:
    group = group_of(16, 3)
    rewards = [a + b for a, b in zip(rule(group, TARGET), ranking(group, TARGET), strict=True)]
    found = group_norm(torch.tensor(rewards, dtype=torch.float64), torch.zeros(16, dtype=torch.int64))
    assert [round(float(found[place]), 2) for place in (3, 0, 15)] == [3.72, -0.63, -0.17]


def test_a_group_without_a_hit_has_no_ranking() -> None:
    assert ranking(group_of(4, None), TARGET) == [0.0] * 4


def test_every_hit_of_a_group_of_samples_has_no_penalty() -> None:
    values = ranking([TARGET, MISS, TARGET], TARGET)
    assert values[0] == values[2] == 0.0
    # 1/log2(3) = 0.63093 of 1 + 0.63093 + 0.5
    assert values[1] == pytest.approx(-0.63093 / 2.13093, abs=1e-5)


@pytest.mark.parametrize(
    ("one", "expected"),
    [(MISS, 0.0), (("a", "y", "c"), 0.2), (("a", "b", "z"), 0.5), (TARGET, 1.0), (("a", "b", "c", "d"), 0.5)],
)
def test_prefix_counts_levels_up_to_the_first_difference(one: tuple[str, ...], expected: float) -> None:
    assert prefix([one], TARGET) == [expected]


def test_prefix_takes_other_values() -> None:
    assert prefix([("a", "y", "z"), TARGET], TARGET, (0.0, 0.3, 2.0)) == [0.3, 2.0]


def test_semantic_is_the_cosine_and_the_best_of_items_that_share_an_id() -> None:
    embeddings = np.array([[1, 0], [0, 2], [3, 3], [0, 0]], dtype=np.float32)
    assert semantic([[0], [1], [2], [0, 2], [3]], [1], embeddings) == pytest.approx([0.0, 1.0, 2**-0.5, 2**-0.5, 0.0])


def test_collaborative_is_the_share_of_items_below() -> None:
    scores = np.array([0.1, 5.0, -2.0, 0.1, 1.0], dtype=np.float32)
    # of four others: all, none, one and half of another, the best of two
    assert collaborative([[1], [2], [0], [2, 4]], scores) == [1.0, 0.0, 0.375, 0.75]
