"""Measures of ranked lists with one right item a list: hits, gain, coverage, novelty. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

from rft_algos.input_checks import refuse


def rank_of(ranked: Sequence[Hashable], target: Hashable) -> int | None:
    """Return the place of the target in a ranked list, the best one 0; None where it is absent (no tensors).

    Args:
        ranked: distinct candidates, best first.
        target: the right one.
    """
    return next((rank for rank, one in enumerate(ranked) if one == target), None)


def hit_at_k(rank: int | None, *, k: int, num_sharing: int = 1) -> float:
    """1 / n where the target is among the first k, else 0: its mean over requests is HR@k (no tensors).

    Where n items share what was ranked, such as one semantic ID, a hit names each of them with chance 1 / n.

    Args:
        rank: of `rank_of`.
        k: places that count, at least 1.
        num_sharing: n, at least 1.

    Returns:
        The hit, in [0, 1]. Example: rank 2 with k = 3 and n = 2 gives 1 / 2, with k = 2 it gives 0.
    """
    _check(k, num_sharing)
    return 1.0 / num_sharing if rank is not None and rank < k else 0.0


def ndcg_at_k(rank: int | None, *, k: int, num_sharing: int = 1) -> float:
    """1 / (n log2(rank + 2)) where the target is among the first k, else 0: its mean over requests is NDCG@k.

    With one right item the ideal gain is 1, so nothing is divided by. No tensors.

    Source: Jarvelin and Kekalainen 2002, "Cumulated gain-based evaluation of IR techniques".

    Args:
        rank: of `rank_of`.
        k: places that count, at least 1.
        num_sharing: n items that share what was ranked, at least 1.

    Returns:
        The gain, in [0, 1]. Example: rank 2 with k = 3 gives 1 / 2, since log2(4) = 2.
    """
    return hit_at_k(rank, k=k, num_sharing=num_sharing) / math.log2((rank or 0) + 2)


def coverage(lists: Iterable[Sequence[Hashable]], *, k: int, num_items: int) -> float:
    """Share of the catalogue that is among the first k of any list (no tensors).

    Source: Ge, Delgado-Battenfeld and Jannach 2010, "Beyond accuracy: evaluating recommender systems by coverage and
    serendipity".

    Args:
        lists: ranked lists.
        k: places that count, at least 1.
        num_items: items of the catalogue, at least 1.

    Returns:
        The share, in [0, 1].
    """
    _check(k, 1)
    if num_items < 1:
        refuse(f"num_items = {num_items}")
    return len({item for ranked in lists for item in ranked[:k]}) / num_items


def novelty(lists: Iterable[Sequence[int]], counts: Mapping[int, int], *, k: int, num_items: int) -> float:
    """Mean of -log2 p(item) over the first k of all lists: how seldom people take what is recommended, in bits.

    p(item) = (count + 1) / (all counts + items), so that an item which nobody took has a share too.

    Source: Zhou et al. 2010 (PNAS 107, 4511), "Solving the apparent diversity-accuracy dilemma of recommender
    systems", for the self-information.

    Args:
        lists: ranked lists of items (plain sequences, no tensors).
        counts: how often each item was taken; absent = never.
        k: places that count, at least 1.
        num_items: items of the catalogue, at least 1.

    Returns:
        The mean, in bits; 0 where the lists are empty. Example: two items of one taken twice and one never give, for
        a list of both, the mean of -log2(3 / 4) and -log2(1 / 4).
    """
    _check(k, 1)
    total = sum(counts.values()) + num_items
    bits = [-math.log2((counts.get(item, 0) + 1) / total) for ranked in lists for item in ranked[:k]]
    return math.fsum(bits) / len(bits) if bits else 0.0


def _check(k: int, num_sharing: int) -> None:
    if k < 1:
        refuse(f"k = {k}, and it must be at least 1")
    if num_sharing < 1:
        refuse(f"num_sharing = {num_sharing}, and it must be at least 1")
