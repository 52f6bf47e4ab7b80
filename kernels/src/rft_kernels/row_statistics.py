"""Statistics of a row of logits: five that can be merged over parts, and three that follow from all parts.

A row's logits may be cut into any parts (slabs of the vocabulary, splits of a kernel's grid, shards of
ranks). With z* the highest logit of a part, each part gives

    highest = z*    total = sum_v exp(z_v - z*)    moment = sum_v (z_v - z*) exp(z_v - z*)

and, of all parts together, log-sum-exp and entropy follow. The moment is kept relative to z*, not as
sum z exp(z - z*), because the entropy would lose digits by cancellation where logits are far from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""A target of this value has log-probability 0 and no gradient; the row's entropy is as usual."""


class SlabSums(NamedTuple):
    """Mergeable sums of each row over one part of the vocabulary [R], or over several parts [S, R]."""

    highest: Tensor
    """Highest logit, float32 (float64 for float64 inputs); -inf where every logit of the part is."""
    total: Tensor
    """Sum of exp(z - highest); 0 where every logit is -inf."""
    moment: Tensor
    """Sum of (z - highest) exp(z - highest)."""
    target: Tensor
    """Logit of the row's target where it lies in the part, else -inf; +inf for a row whose target is
    `IGNORED`, which outlives a merge by maximum and which no logit can be (its row would be NaN)."""
    argmax: Tensor
    """int64 id of the highest logit in the whole vocabulary's numbering, the lowest id on ties."""


class RowSums(NamedTuple):
    """Statistics of each row over the whole vocabulary, [R] each, in nats."""

    normalizer: Tensor
    """log sum_v exp(z_v)."""
    logprob: Tensor
    """z_target - normalizer; 0 where the target is `IGNORED`, -inf where no part held the target."""
    entropy: Tensor
    """normalizer - sum_v p_v z_v."""
    argmax: Tensor
    """int64 id of the highest logit, the lowest id on ties."""


def stacked(parts: SlabSums | list[SlabSums]) -> SlabSums:
    """[S, R] of parts that are [S, R] already, of one part [R], or of a list of parts [R] each."""
    if isinstance(parts, SlabSums):
        return parts if parts.highest.ndim == 2 else SlabSums(*(tensor[None] for tensor in parts))
    return SlabSums(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


def num_parts(length: int, part: int) -> int:
    """Return the number of parts of at most `part` that cover `length`."""
    return -(-length // part)
