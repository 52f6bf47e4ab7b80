"""One packed row over several ranks: each computes a run of its tokens, and attention a share of the heads.

Everything but attention looks at one token, so a rank that holds T / S tokens of a row needs 1 / S of the memory of
its activations. Before attention the ranks trade: each gives away all tokens' worth of the other ranks' heads and gets
all tokens of its own heads; afterwards back (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509). Where the heads do
not divide, heads of zeros are added, and keys and values are repeated to the query heads that share them.

Shape letters: T tokens of the row, L of them here, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_models.packed_attention import RowLayout


class SequenceRanks(Protocol):
    """The ranks that share a row; gradients of what they exchange are exchanged back."""

    @property
    def size(self) -> int:
        """S; 1 or above."""
        ...

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """First and behind-the-last row of this rank; the runs of all ranks in order are the whole."""
        ...

    def to_heads(self, rows_LHD: Tensor, num_rows: int) -> Tensor:
        """[L, H, D] of this rank's rows -> [T, H / S, D]: all rows of this rank's heads. S divides H."""
        ...

    def to_rows(self, rows_THD: Tensor, num_rows: int) -> Tensor:
        """The way back: [T, H / S, D] -> [L, H, D]."""
        ...

    def merge(self, values: Tensor) -> Tensor:
        """The sum over ranks, of which each gives its own places and zeros elsewhere.

        The gradient of the sum goes to each rank as it is: all of them compute the same from the sum.
        """
        ...


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """A layout of the whole row, for a rank that has a run of its tokens."""

    whole: RowLayout
    ranks: SequenceRanks
    num_rows: int

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """[L, H, D] of this rank's rows, each having seen all tokens before it in its segment."""
        num_heads = query_THD.shape[1]
        query, key, value = even_heads(query_THD, key_TGD, value_TGD, self.ranks.size)
        shares = [self.ranks.to_heads(tensor, self.num_rows) for tensor in (query, key, value)]
        attended = self.whole.attend(*shares, **settings)
        return self.ranks.to_rows(attended, self.num_rows)[:, :num_heads].contiguous()


def even_heads(query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, num_shares: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same heads, in numbers that can be shared out: with heads of zeros, and keys repeated where they must be.

    A share of the query heads then needs its share of the key and value heads and no other.
    """
    num_heads, num_groups = query_LHD.shape[1], key_LGD.shape[1]
    if num_heads % num_shares == 0 and num_groups % num_shares == 0:
        return query_LHD, key_LGD, value_LGD
    added = -num_heads % num_shares
    each = num_heads // num_groups
    repeated = (tensor.repeat_interleave(each, dim=1) for tensor in (key_LGD, value_LGD))
    key, value = (F.pad(tensor, (0, 0, 0, added)) for tensor in repeated)
    return F.pad(query_LHD, (0, 0, 0, added)), key, value


def rows_here(tokens_R: Tensor, rows_R: Tensor, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(tokens, rows counted from the first one here) of those whose row this rank computes."""
    first, behind = bounds
    here_R = torch.logical_and(rows_R >= first, rows_R < behind)
    return tokens_R[here_R], rows_R[here_R] - first
