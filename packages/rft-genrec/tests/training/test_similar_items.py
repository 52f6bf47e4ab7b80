from __future__ import annotations

import itertools
import re

import numpy as np

from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.training.similar_items import neighbours, similar_rows

IDS = SemanticIds(tuple((f"<a_{item // 3}>", f"<b_{item % 3}>") for item in range(60)))
# twenty bundles of three items; a bundle's vectors have cosines near 1, those of two bundles 0
VECTORS = np.repeat(np.eye(20, dtype=np.float32), 3, axis=0) + 0.01 * np.eye(60, 20, dtype=np.float32)


def _walks(seed: int) -> list[list[int]]:
    of_token = {"".join(tokens): item for item, tokens in enumerate(IDS.tokens_by_item)}
    rows = similar_rows(PromptBuilder(IDS), VECTORS, num_steps=3, seed=seed)
    return [[of_token[one] for one in re.findall(r"<a_\d+><b_\d+>", row.prompt + row.response)] for row in rows]


def test_every_item_begins_one_walk_that_never_stays_where_it_is() -> None:
    walks = _walks(0)
    assert [walk[0] for walk in walks] == list(range(60))
    assert all(len(walk) == 4 for walk in walks)
    assert all(a != b for walk in walks for a, b in itertools.pairwise(walk))


def test_a_walk_goes_to_items_of_similar_texts() -> None:
    steps = [(a, b) for walk in _walks(0) for a, b in itertools.pairwise(walk)]
    assert sum(a // 3 == b // 3 for a, b in steps) > 0.99 * len(steps)


def test_the_seed_and_nothing_else_decides_the_walks() -> None:
    assert _walks(0) == _walks(0)
    assert _walks(0) != _walks(1)


def test_neighbours_are_ordered_by_cosine_and_their_shares_add_up_to_one() -> None:
    vectors = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.0]], dtype=np.float32)
    nearest_NK, cumulative_NK = neighbours(vectors)
    assert nearest_NK[0].tolist() == [1, 2, 3]
    assert nearest_NK[2].tolist()[0] == 1
    np.testing.assert_allclose(cumulative_NK[:, -1], 1.0, rtol=1e-6)
    # a text of which nothing is known is as far from all others
    np.testing.assert_allclose(np.diff(cumulative_NK[3], prepend=0), 1 / 3, rtol=1e-6)
