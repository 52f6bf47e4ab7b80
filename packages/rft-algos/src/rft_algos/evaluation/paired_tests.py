"""Tests of a change between two measurements of the same items: exact for right and wrong, by sign flips for reals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rft_algos.input_checks import refuse
from rft_core.keyed_random import uniforms

_EXACT_ITEMS = 12
"""Items up to which all 2^m sign flips are counted."""
_BLOCK = 1_000_000


def mcnemar_exact(num_won: int, num_lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: b items right only after, c only before.

    p = min(1, 2 * sum_{i <= min(b, c)} C(b + c, i) / 2^(b + c)): under no change each of the b + c items that changed
    is won or lost with equal chance.

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages",
    with the binomial in place of its approximation.

    Args:
        num_won: b (plain integers, no tensors).
        num_lost: c.

    Returns:
        The p-value, in (0, 1]; 1 where nothing changed. Example: 5 won and 0 lost give 2 / 32.
    """
    if num_won < 0 or num_lost < 0:
        refuse(f"{num_won} won and {num_lost} lost")
    changed, fewer = num_won + num_lost, min(num_won, num_lost)
    tail = sum(math.comb(changed, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)


def sign_flip_test(differences: Sequence[float], *, key: int, num_flips: int = 9_999) -> float:
    """Two-sided p-value of the sign-flip permutation test that the mean of paired differences is 0.

    The share of sign patterns s with |sum_i s_i d_i| >= |sum_i d_i|; differences of 0 have no sign and are left out. Up
    to 12 others all patterns are counted; of more, `num_flips` = B patterns are drawn under `key`, and
    p = (1 + number) / (1 + B), which counts the observed one.

    Source: Fisher 1935, "The design of experiments", section 21; Phipson and Smyth 2010, "Permutation p-values should
    never be zero", for the 1.

    Args:
        differences: after - before of each item (a plain sequence, no tensors).
        key: of the drawn patterns, as `rft_core.keyed_random.derive_key` gives it.
        num_flips: B, at least 1.

    Returns:
        The p-value, in (0, 1]; 1 where nothing changed. Example: differences 1, 1, 1 give 2 / 8.
    """
    if num_flips < 1:
        refuse(f"num_flips = {num_flips}")
    moved = torch.tensor([difference for difference in differences if difference], dtype=torch.float64)
    num = len(moved)
    if not num:
        return 1.0
    # equal sums in another order differ by roundings
    least = moved.sum().abs() - 1e-12 * moved.abs().sum()
    if num <= _EXACT_ITEMS:
        patterns = torch.arange(2**num).reshape(-1, 1) >> torch.arange(num) & 1
        return float(((moved * (1 - 2 * patterns)).sum(1).abs() >= least).double().mean())
    reached, step = 0, max(1, _BLOCK // num)
    for start in range(0, num_flips, step):
        rows = min(step, num_flips - start)
        flips = uniforms([key], rows * num, start=start * num).reshape(rows, num) < 0.5
        reached += int((torch.where(flips, -moved, moved).sum(1).abs() >= least).sum())
    return (1 + reached) / (1 + num_flips)
