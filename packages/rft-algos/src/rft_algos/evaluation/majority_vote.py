"""Accuracy of the answer that most of k samples give: maj@k. Torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache

from rft_algos.input_checks import refuse


def majority_at_k_estimate(votes: Sequence[Hashable | None], correct: Sequence[float], *, k: int) -> float:
    """Expected correctness of the majority answer of k of the n samples, over all draws without replacement.

    sum over answers a of P(a wins a draw of k) * mean correctness of the samples that say a. The answer with the most
    votes wins; of several with equally many each wins with equal chance, in expectation: no order of the samples
    decides. A sample without an answer has no vote, and a draw without a vote has correctness 0. With k = 1 it is the
    share of correct samples that have an answer.

    Source: Wang et al. 2022, "Self-consistency improves chain of thought reasoning in language models"
    (arXiv 2203.11171), section 2, for the vote.

    Args:
        votes: n answers, equal ones equal; None = no answer (a plain sequence, no tensors).
        correct: n numbers in [0, 1].
        k: how many samples are drawn, in [1, n].

    Returns:
        The estimate, in [0, 1]. Example: votes 5, 5, 7 with 7 correct and k = 2: the draws (5, 5), (5, 7), (5, 7)
        give (0 + 1/2 + 1/2) / 3.
    """
    num = len(votes)
    if len(correct) != num:
        refuse(f"votes need as many correctnesses: {num} against {len(correct)}")
    if not 1 <= k <= num:
        refuse(f"k = {k} of {num} samples")
    said: dict[Hashable, list[float]] = defaultdict(list)
    for vote, value in zip(votes, correct, strict=True):
        if vote is not None:
            said[vote].append(value)
    silent = num - sum(map(len, said.values()))
    draws, terms = math.comb(num, k), list[float]()
    for vote, values in said.items():
        share = math.fsum(values) / len(values)
        if share:
            others = tuple(sorted(len(other) for answer, other in said.items() if answer != vote))
            terms.append(share * _wins(len(values), others, silent, k) / draws)
    return math.fsum(terms)


@lru_cache(maxsize=4096)
def _wins(size: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Count the draws of k that an answer said `size` times wins; a draw with t equals counts 1 / (t + 1)."""
    return math.fsum(
        math.comb(size, votes) * won
        for votes in range(1, min(size, k) + 1)
        if (won := _beaten(votes, others, silent, k))
    )


def _beaten(votes: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Count the ways to draw the other k - votes samples so that no other answer has more than `votes`."""
    left = k - votes
    # (samples drawn, answers that have exactly `votes`) -> ways, answer after answer
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for size in others:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (drawn, ties), number in ways.items():
            for taken in range(min(size, votes, left - drawn) + 1):
                longer[drawn + taken, ties + (taken == votes)] += number * math.comb(size, taken)
        ways = longer
    return math.fsum(number * math.comb(silent, left - drawn) / (ties + 1) for (drawn, ties), number in ways.items())
