"""Semantic IDs dealt to the items at random: what is left of a model when its IDs carry no meaning."""

from __future__ import annotations

from rft_core.keyed_random import derive_key, permutation
from rft_genrec.catalogue.records import SemanticIds


def dealt_at_random(ids: SemanticIds, seed: int) -> SemanticIds:
    """Return the same IDs, each as often as before, dealt to the items in a random order of the seed."""
    order = permutation(derive_key(seed, "dealt_ids"), len(ids)).tolist()
    return SemanticIds(tuple(ids.tokens_by_item[place] for place in order))
