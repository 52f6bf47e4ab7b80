"""Statistics of a row's logits, kept in place of the logits and merged over slabs, splits and ranks.

    z* = max z_v,  t = sum_v exp(z_v - z*),  u = sum_v (z_v - z*) exp(z_v - z*)
    log p(y) = (z_y - z*) - log t            H = log t - u / t

Two sets of vocabulary entries merge exactly: with Z = max(z1*, z2*) and w = exp(z* - Z), t = sum w t and
u = sum w (u + (z* - Z) t). Everything is measured from the row's highest logit, so that large logits
cost no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

IGNORED = -100
"""A target of this value is no target: log-probability 0, no gradient."""


class Collectives(Protocol):
    """Sums and maxima over the ranks that share one vocabulary."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def sum(self, tensor: Tensor) -> Tensor: ...
    def max(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's rows of the output matrix: vocabulary entries offset .. offset + V_local."""

    offset: int
    collectives: Collectives


class SlabSums(NamedTuple):
    """[R] (or [S, R] where stacked) of some vocabulary entries; float32, or float64 for float64 products."""

    highest: Tensor
    """z*; -inf where there are no entries."""
    total: Tensor
    """t."""
    moment: Tensor | None
    """u; None where no entropy is wanted."""
    target: Tensor
    """z_y where the target is among the entries, else -inf."""
    argmax: Tensor | None
    """int64 id in the whole vocabulary of the highest entry (the lowest id of several); None unless wanted."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """[R] each, of the whole vocabulary."""

    logprobs: Tensor
    """0 for ignored targets."""
    entropy: Tensor
    """0 where not wanted."""
    highest: Tensor
    log_total: Tensor
    argmax: Tensor | None


def merge_slabs(parts: Sequence[SlabSums]) -> SlabSums:
    """Concatenate the rows of several parts [R]."""
    if len(parts) == 1:
        return parts[0]
    columns: list[Any] = [None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)]
    return SlabSums(*columns)


def merge_rows(sums: SlabSums) -> SlabSums:
    """[S, R] over disjoint sets of entries -> [R] of all; the order of the sums is fixed."""
    highest_R = sums.highest.amax(0)
    below = sums.highest - _finite(highest_R)
    total_R, moment_R = _rescaled(sums, below)
    argmax_R = None
    if sums.argmax is not None:
        # of several highest entries the lowest id, so that the cut into slabs does not show
        argmax_R = torch.where(below == 0, sums.argmax, torch.iinfo(torch.int64).max).amin(0)
    target_R = sums.target.amax(0)
    moment_R = None if moment_R is None else moment_R.sum(0)
    return SlabSums(highest_R, total_R.sum(0), moment_R, target_R, argmax_R)


def merged_over_ranks(sums: SlabSums, collectives: Collectives) -> SlabSums:
    """Merge sums over ranks: one maximum of [2, R], one sum of [2, R], and a maximum of [R] for the argmax."""
    highest_R, target_R = collectives.max(torch.stack((sums.highest, sums.target))).unbind()
    total_R, moment_R = _rescaled(sums, sums.highest - _finite(highest_R))
    added = collectives.sum(torch.stack((total_R,) if moment_R is None else (total_R, moment_R)))
    argmax_R = None
    if sums.argmax is not None:
        below_all = torch.iinfo(torch.int64).min
        # the lowest id as the maximum of negative ids: there is no collective for a minimum
        argmax_R = -collectives.max(torch.where(sums.highest == highest_R, -sums.argmax, below_all))
    return SlabSums(highest_R, added[0], None if moment_R is None else added[1], target_R, argmax_R)


def top_k_over_ranks(values: Tensor, ids: Tensor, top_k: int, ranks: Collectives) -> tuple[Tensor, Tensor]:
    """Select the k highest of every rank's [R, <= k] highest logits, and their ids.

    Each rank writes into its own place of a table of zeros; the sum over ranks is the table of all.
    """
    # a shard may have fewer entries than k; -inf is behind every real logit
    missing = top_k - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    tables = [x.new_zeros(ranks.world_size, *x.shape) for x in (values, ids)]
    for table, own in zip(tables, (values, ids), strict=True):
        table[ranks.rank] = own
    values, ids = (ranks.sum(table).movedim(0, 1).flatten(1) for table in tables)
    values, indices = values.topk(top_k, 1)
    return values, ids.gather(1, indices)


def _rescaled(sums: SlabSums, below: Tensor) -> tuple[Tensor, Tensor | None]:
    """(w t, w (u + (z* - Z) t)) with z* - Z = `below`; 0 where there are no entries."""
    share = below.exp()
    total = share * sums.total
    if sums.moment is None:
        return total, None
    # without entries `below` is -inf, and -inf times 0 would be NaN
    return total, share * sums.moment + torch.where(share > 0, below * total, 0.0)


def _finite(highest: Tensor) -> Tensor:
    """Replace -inf by the lowest number: a shard without entries has 0 of everything, not NaN."""
    return highest.clamp(min=torch.finfo(highest.dtype).min)


def to_logprobs(sums: SlabSums, targets_R: Tensor) -> RowSums:
    """Compute log-probability and entropy from the sums over the whole vocabulary."""
    log_total_R = sums.total.log()
    logprobs_R = (sums.target - sums.highest - log_total_R).masked_fill(targets_R == IGNORED, 0.0)
    entropy_R = torch.zeros_like(log_total_R) if sums.moment is None else log_total_R - sums.moment / sums.total
    return RowSums(logprobs_R, entropy_R, sums.highest, log_total_R, sums.argmax)
