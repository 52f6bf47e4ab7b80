"""Reward terms of a group of recommendations, one function a term; pure, without files and models.

A group is what was recommended after one history, in its order: the best first where the group is one of beams. The
values of a term have one entry a recommendation. Numbers are in units of reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Id = tuple[str, ...]
"""Tokens of a semantic ID, from the coarsest level to the finest."""

PREFIX_VALUES = (0.0, 0.2, 0.5, 1.0)
"""Reward of 0, 1, 2 and 3 shared levels."""


class ItemScorer(Protocol):
    """A model that scores every item of a catalogue after a history, such as SASRec."""

    def scores(self, histories: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return [B, N]: the score of each of N items after each of B histories, the higher the likelier."""
        ...


def rule(group: Sequence[Id], target: Id) -> list[float]:
    """1 for the ID of the target, else 0.

    Example: `rule([("a", "b"), ("a", "c")], ("a", "c"))` is `[0.0, 1.0]`.
    """
    return [float(one == target) for one in group]


def ranking(group: Sequence[Id], target: Id) -> list[float]:
    """Penalty of a miss by its place, where the group has a hit: -(1 / log2(i + 2)) / sum_j 1 / log2(j + 2).

    A hit has 0, and so has every member of a group without a hit. The sum is over all places of the group, so that
    misses share a penalty of less than 1. It means what it says where places are ranks, as those of beams are; those
    of samples are in no order.

    Source: MiniOneRec (arXiv 2510.24431), its reward `ranking_only`.

    Example: a group of 16 with a hit at place 3 has -0.1638, -0.1033, -0.0819, 0, ..., -0.0401.
    """
    hits = rule(group, target)
    if not any(hits):
        return [0.0] * len(group)
    discounts = [1.0 / math.log2(place + 2) for place in range(len(group))]
    total = math.fsum(discounts)
    return [0.0 if hit else -discount / total for hit, discount in zip(hits, discounts, strict=True)]


def prefix(group: Sequence[Id], target: Id, values: Sequence[float] = PREFIX_VALUES) -> list[float]:
    """Reward of the levels that an ID shares with the target, counted from the coarsest up to the first difference.

    `values[n]` is that of n levels, the last one that of the whole ID, which longer IDs have for all of their levels
    only: of more shared levels than there are values it is the last but one.

    Example: `prefix([("a", "b", "x")], ("a", "b", "c"))` is `[0.5]`.
    """

    def value(one: Id) -> float:
        shared = 0
        while shared < min(len(one), len(target)) and one[shared] == target[shared]:
            shared += 1
        return values[-1] if one == target else values[min(shared, len(values) - 2)]

    return [value(one) for one in group]


def semantic(group: Sequence[Sequence[int]], target: Sequence[int], embeddings_ND: NDArray[np.float32]) -> list[float]:
    """Cosine of the embeddings of a recommended item and of the target.

    Args:
        group: the items of each recommended ID, one or several that share it.
        target: the items of the target's ID.
        embeddings_ND: [N, D] one row an item.

    Returns:
        The largest cosine over the items that share an ID, in [-1, 1]; 0 for a row of zeros.
    """
    wanted_KD = _normalised(embeddings_ND[list(target)])
    return [float((_normalised(embeddings_ND[list(items)]) @ wanted_KD.T).max()) for items in group]


def collaborative(group: Sequence[Sequence[int]], scores_N: NDArray[np.float32]) -> list[float]:
    """Share of the other items that a model of users and items puts below a recommended one, in [0, 1].

    A place and not the score itself: scores of different histories have different scales, and no bounds.

    Args:
        group: the items of each recommended ID; the best of several counts.
        scores_N: [N] the model's score of every item after this history.

    Returns:
        1 for the item that the model puts first, 0 for the last; equal scores count half.
    """
    others = max(1, len(scores_N) - 1)

    def value(items: Sequence[int]) -> float:
        score = scores_N[list(items)].max()
        equals = int((scores_N == score).sum()) - 1
        return (int((scores_N < score).sum()) + 0.5 * equals) / others

    return [value(items) for items in group]


def _normalised(rows_KD: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths_K1 = np.linalg.norm(rows_KD, axis=1, keepdims=True)
    return (rows_KD / np.where(lengths_K1 == 0.0, 1.0, lengths_K1)).astype(np.float32)
