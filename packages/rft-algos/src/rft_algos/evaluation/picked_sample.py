"""Accuracy of the sample that a score picks among k: picked@k. Torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rft_algos.input_checks import refuse


def picked_at_k_estimate(scores: Sequence[float], correct: Sequence[float], *, k: int) -> float:
    """Expected correctness of the highest-scored of k of the n samples, over all draws without replacement.

    sum over scores s of (C(b + m, k) - C(b, k)) / C(n, k) * mean correctness of the m samples at s, with b samples
    below s: in so many draws s is the highest score, and each of the m is then picked with equal chance, so that no
    order of the samples decides. With the correctness as score it is pass@k, with equal scores the share of correct
    samples.

    Source: Cobbe et al. 2021, "Training verifiers to solve math word problems" (arXiv 2110.14168), section 4.2, for
    the choice by a score; the expectation over draws is that of Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Args:
        scores: n numbers, such as a reward model's (a plain sequence, no tensors).
        correct: n numbers in [0, 1].
        k: how many samples are drawn, in [1, n].

    Returns:
        The estimate, in [0, 1]. Example: scores 3, 1, 2 with the first correct and k = 2: the draws (3, 1), (3, 2),
        (1, 2) give (1 + 1 + 0) / 3.
    """
    num = len(scores)
    if len(correct) != num:
        refuse(f"scores need as many correctnesses: {num} against {len(correct)}")
    if any(math.isnan(score) for score in scores):
        refuse("a score is NaN, which is neither above nor below another")
    if not 1 <= k <= num:
        refuse(f"k = {k} of {num} samples")
    equal: dict[float, list[float]] = defaultdict(list)
    for score, value in zip(scores, correct, strict=True):
        equal[score].append(value)
    below, draws, terms = 0, math.comb(num, k), list[float]()
    for score in sorted(equal):
        values = equal[score]
        picked = math.comb(below + len(values), k) - math.comb(below, k)
        terms.append(math.fsum(values) / len(values) * (picked / draws))
        below += len(values)
    return math.fsum(terms)
