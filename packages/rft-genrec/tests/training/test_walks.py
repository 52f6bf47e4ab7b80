from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from rft_genrec.baselines.counters import Transitions
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.training.walks import NextItems, walk_rows

IDS = SemanticIds(tuple((f"<a_{item // 3}>", f"<b_{item % 3}>") for item in range(12)))
SEQUENCES = [[0, 1, 2, 3], [0, 1, 4], [5, 6, 0, 1]]
# four bundles of three items; a bundle's vectors have cosines near 1, those of two bundles 0
VECTORS = np.repeat(np.eye(4, dtype=np.float32), 3, axis=0) + 0.01 * np.eye(12, 4, dtype=np.float32)


def walks(next_items: NextItems, *, num_walks: int, num_steps: int = 3, seed: int = 0) -> list[list[int]]:
    of_token = {"".join(tokens): item for item, tokens in enumerate(IDS.tokens_by_item)}
    rows = list(walk_rows(PromptBuilder(IDS), next_items, 12, num_walks=num_walks, num_steps=num_steps, seed=seed))
    assert len({row.name for row in rows}) == len(rows)
    return [[of_token[one] for one in re.findall(r"<a_\d+><b_\d+>", row.prompt + row.response)] for row in rows]


def test_every_item_begins_as_many_walks_as_are_asked_for() -> None:
    found = walks(NextItems(SEQUENCES, 12), num_walks=4)
    assert [walk[0] for walk in found] == [item for item in range(12) for _ in range(4)]
    assert all(len(walk) == 4 for walk in found)


def test_first_steps_have_the_shares_of_the_counter() -> None:
    found = walks(NextItems(SEQUENCES, 12), num_walks=1000, num_steps=1)
    drawn = Counter(walk[1] for walk in found if walk[0] == 0)
    later, shares = Transitions(SEQUENCES, 12).followers(0)
    for item, share in zip(later.tolist(), shares / shares.sum(), strict=True):
        # the draws are spread evenly, so that a share is met to one in a thousand
        assert drawn[item] / 1000 == pytest.approx(share, abs=0.0021)
    assert drawn.keys() == set(later.tolist())


def test_chances_are_those_of_transitions_and_texts_over_a_history() -> None:
    next_items = NextItems(SEQUENCES, 12, embeddings_ND=VECTORS, text_weight=0.3)
    counted = Transitions(SEQUENCES, 12, popularity_weight=0.0)
    history = [5, 0, 1]
    expected = counted.scores([history])[0]
    for age, item in enumerate(reversed(history)):
        same = [other for other in range(item // 3 * 3, item // 3 * 3 + 3) if other != item]
        expected[same] += counted.decay**age * 0.3 / 2
    steps = (np.arange(400) + 0.5) / 400
    drawn = Counter(next_items.draw(history, which, where) for which, where in itertools.product(steps, steps))
    found = np.array([drawn[item] for item in range(12)]) / 400**2
    np.testing.assert_allclose(found, expected / expected.sum(), atol=5e-3)


def test_behind_what_nothing_is_known_of_popular_items_follow() -> None:
    next_items = NextItems(SEQUENCES, 12)
    steps = (np.arange(2000) + 0.5) / 2000
    drawn = Counter(next_items.draw([11], 0.5, where) for where in steps)
    # the items 0 and 1 were taken three times each: (3 + 1) / (11 + 12)
    assert drawn[0] / 2000 == pytest.approx(4 / 23, abs=1e-3)
    assert len(drawn) == 12


def test_the_seed_and_nothing_else_decides_the_walks() -> None:
    next_items = NextItems(SEQUENCES, 12)
    assert walks(next_items, num_walks=2) == walks(next_items, num_walks=2)
    assert walks(next_items, num_walks=2) != walks(next_items, num_walks=2, seed=1)
