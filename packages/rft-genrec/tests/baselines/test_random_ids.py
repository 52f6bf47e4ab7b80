"""IDs dealt at random are the same IDs, on other items."""

from __future__ import annotations

from collections import Counter

from rft_genrec.baselines.random_ids import dealt_at_random
from rft_genrec.catalogue.records import SemanticIds

IDS = SemanticIds(tuple((f"<a_{n % 7}>", f"<b_{n % 5}>") for n in range(70)))


def test_each_id_is_dealt_as_often_as_before() -> None:
    dealt = dealt_at_random(IDS, seed=1)
    assert Counter(dealt.tokens_by_item) == Counter(IDS.tokens_by_item)
    assert dealt != IDS


def test_the_seed_decides() -> None:
    assert dealt_at_random(IDS, seed=1) == dealt_at_random(IDS, seed=1) != dealt_at_random(IDS, seed=2)
