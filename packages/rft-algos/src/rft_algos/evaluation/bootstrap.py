"""Percentile bootstrap: intervals of means whose values follow no known law, drawn under a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.statistics import Interval
from rft_core.keyed_random import uniforms

_BLOCK = 2_000_000


def resampled_means(columns: Sequence[Sequence[float]], *, key: int, num_draws: int = 1000) -> Tensor:
    """Means of every column over `num_draws` = B samples of n rows with replacement, the same rows for all columns.

    As columns share the rows, the difference of two means of one draw is a paired one.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".

    Args:
        columns: M measurements of the same n >= 1 items each (plain sequences, no tensors).
        key: of the draws, as `rft_core.keyed_random.derive_key` gives it.
        num_draws: B, at least 1.

    Returns:
        [B, M] float64.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or 0 in lengths:
        refuse(f"columns of {sorted(lengths)} rows; all need equally many, at least one")
    if num_draws < 1:
        refuse(f"num_draws = {num_draws}")
    values_MN = torch.tensor([list(column) for column in columns], dtype=torch.float64)
    num, step = values_MN.shape[1], max(1, _BLOCK // values_MN.shape[1])
    means: list[Tensor] = []
    for start in range(0, num_draws, step):
        draws = min(step, num_draws - start)
        rows = (uniforms([key], draws * num, start=start * num)[0] * num).long()
        # each draw counts its rows in a part of its own
        places = rows + num * torch.arange(draws).repeat_interleave(num)
        counts_BN = torch.bincount(places, minlength=draws * num).reshape(draws, num).double()
        means.append(counts_BN @ values_MN.T / num)
    return torch.cat(means)


def bootstrap_intervals(
    columns: Sequence[Sequence[float]], *, key: int, num_draws: int = 1000, level: float = 0.95
) -> list[Interval]:
    """Mean of each column with the (1 - level) / 2 and (1 + level) / 2 quantiles of its resampled means.

    Source: Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 13.

    Args:
        columns: M measurements of the same n >= 1 items each (plain sequences, no tensors).
        key: of the draws.
        num_draws: B, at least 1.
        level: coverage, in (0, 1).

    Returns:
        One interval a column.
    """
    if not 0 < level < 1:
        refuse(f"level = {level} outside (0, 1)")
    means_BM = resampled_means(columns, key=key, num_draws=num_draws)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low_M, high_M = means_BM.quantile(ends, dim=0)
    return [
        Interval(float(torch.tensor(list(column), dtype=torch.float64).mean()), float(low), float(high), len(column))
        for column, low, high in zip(columns, low_M, high_M, strict=True)
    ]
