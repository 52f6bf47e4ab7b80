"""One packed row over several ranks, each of which computes a part of its tokens.

Everything but attention looks at one token, so a rank that holds T / S tokens of a row needs 1 / S of the memory of
its activations. For attention there are two ways:

- Ulysses: the ranks trade, each gives away all tokens' worth of the other ranks' heads and gets all tokens of its own
  heads; afterwards back (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509). Where the heads do not divide, heads
  of zeros are added, and keys and values are repeated to the query heads that share them.
- A ring: keys and values of all ranks pass by, see `ring.ring_attention`. Any number of heads is shared so.

"auto" takes Ulysses where the heads of queries and of keys divide, else the ring.

Shape letters: T tokens of the row, L of them here, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_core.errors import OptionsError
from rft_models.attention.packed import PiecedLayout
from rft_models.attention.ring import Ring, ring_attention
from rft_models.attention.ring_layout import RingRow, inverse

SequenceMode = Literal["auto", "ulysses", "ring"]


class SequenceRanks(Ring, Protocol):
    """The ranks that share a row; gradients of what they exchange are exchanged back."""

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """First and behind-the-last row of this rank; the runs of all ranks in order are the whole."""
        ...

    def lengths(self, num_rows: int) -> list[int]:
        """Return the number of rows of each rank."""
        ...

    def to_heads(self, rows_LHD: Tensor, num_rows: int) -> Tensor:
        """[L, H, D] of this rank's rows -> [T, H / S, D]: all rows of this rank's heads. S divides H."""
        ...

    def to_rows(self, rows_THD: Tensor, num_rows: int) -> Tensor:
        """Invert `to_heads`: [T, H / S, D] -> [L, H, D]."""
        ...

    def hand_out(self, rows_LD: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Give each rank its number of these rows, in order; those that they give to this one, in order."""
        ...

    def merge(self, values: Tensor) -> Tensor:
        """Sum values over the ranks, each of which has its own rows and zeros elsewhere.

        The gradient of the sum goes to each rank as it is: all of them compute the same from the sum.
        """
        ...


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """A layout of the whole row, for a rank that has a run of its tokens and trades them for heads."""

    whole: PiecedLayout
    ranks: SequenceRanks
    num_rows: int

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """[L, H, D] of this rank's rows, each having seen all tokens before it in its segment."""
        num_heads = query_THD.shape[1]
        query, key, value = even_heads(query_THD, key_TGD, value_TGD, self.ranks.size)
        shares = [self.ranks.to_heads(tensor, self.num_rows) for tensor in (query, key, value)]
        attended = self.whole.attend(*shares, **settings)
        # the heads of zeros that `even_heads` added are dropped again
        return self.ranks.to_rows(attended, self.num_rows)[:, :num_heads].contiguous()


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A layout of the whole row, for a rank that has two runs of its tokens and sees the others' keys pass by."""

    row: RingRow
    ranks: SequenceRanks

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, **settings: Any) -> Tensor:
        """[L, H, D] of this rank's rows, each having seen all tokens before it in its segment."""
        return ring_attention(query_THD, key_TGD, value_TGD, self.row, self.ranks, **settings)


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """Sequence parallelism of rows: the ranks that share them, and which of the two attentions they use."""

    ranks: SequenceRanks
    by_ring: bool

    def of(self, whole: PiecedLayout, num_rows: int, device: torch.device) -> SequenceShard:
        """Return the part of a row that this rank computes."""
        here = self.ranks.bounds(num_rows)
        if not self.by_ring:
            return SequenceShard(SplitLayout(whole, self.ranks, num_rows), here, None)
        row = RingRow.of(whole.pieces(), self.ranks.lengths(num_rows), self.ranks.rank, device)
        return SequenceShard(RingLayout(row, self.ranks), here, row.order_K)


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """This rank's part of one row."""

    layout: SplitLayout | RingLayout
    here: tuple[int, int]
    """First and behind-the-last of its rows, in the order in which the ranks hold them."""
    order_K: Tensor | None
    """[K] the rows in that order; None: as they stand."""

    @property
    def rows(self) -> slice | Tensor:
        """This rank's rows of the row: a run, or [L] places."""
        own = slice(*self.here)
        return own if self.order_K is None else self.order_K[own]

    def places(self, place_T: Tensor | None) -> Tensor | None:
        """Map the index of each token's state in the row to its index in the order of the ranks."""
        if self.order_K is None:
            return place_T
        place_K = inverse(self.order_K)
        return place_K if place_T is None else place_K[place_T]


def takes_ring(mode: SequenceMode, config: Any, num_ranks: int, where: str) -> bool:
    """Return true where a decoder of this configuration is shared by a ring.

    Raises:
        OptionsError: it has to be, and the decoder drops entries of the attention, which a ring does not.
    """
    num_heads = int(getattr(config, "num_attention_heads", 1))
    num_groups = int(getattr(config, "num_key_value_heads", None) or num_heads)
    divide = num_heads % num_ranks == 0 and num_groups % num_ranks == 0
    if mode == "ulysses" or (mode == "auto" and divide):
        return False
    if float(getattr(config, "attention_dropout", None) or 0.0) > 0:
        raise OptionsError(
            code="models.ring_dropout",
            what=f"attention_dropout = {config.attention_dropout} with a ring of {num_ranks} ranks",
            where=where,
            why="a ring computes the attention weights twice, and dropout would zero other entries the second time",
            state="nothing was changed",
            do="--sp_mode ulysses",
        )
    return True


def even_heads(query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, num_shares: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same heads in numbers that can be shared: with heads of zeros, and keys repeated where needed.

    A share of the query heads then needs its share of the key and value heads and no other.
    """
    num_heads, num_groups = query_LHD.shape[1], key_LGD.shape[1]
    if num_heads % num_shares == 0 and num_groups % num_shares == 0:
        return query_LHD, key_LGD, value_LGD
    # an added head weighs values of zeros: it gives zeros, which are cut off again behind the attention
    added = -num_heads % num_shares
    each = num_heads // num_groups
    repeated = (tensor.repeat_interleave(each, dim=1) for tensor in (key_LGD, value_LGD))
    key, value = (F.pad(tensor, (0, 0, 0, added)) for tensor in repeated)
    return F.pad(query_LHD, (0, 0, 0, added)), key, value


def local_rows(tokens_R: Tensor, rows_R: Tensor, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(tokens, rows counted from the first one here) of those whose row this rank computes."""
    first, behind = bounds
    here_R = torch.logical_and(rows_R >= first, rows_R < behind)
    return tokens_R[here_R], rows_R[here_R] - first


def balance_rows(
    ranks: SequenceRanks, hidden_LD: Tensor, num_rows: int, tokens_R: Tensor, rows_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ([N] tokens, [N, D] states of their rows): this rank's even share of the R tokens.

    All ranks pass the same R. The wanted tokens of a context are its last ones, so that the ranks with the first rows
    would form no logits and the last one all, and keep them. States are redistributed instead, so that every rank has
    equally many.

    Args:
        ranks: who share the row.
        hidden_LD: this rank's states.
        num_rows: K, rows of all ranks.
        tokens_R: tokens, and
        rows_R: the row that each one's prediction comes from, in the order in which the ranks hold the rows.
    """
    # in the order in which the ranks hold the rows: what a rank has, sends and receives is then one run each
    rows_R, order_R = rows_R.sort(stable=True)
    lengths = ranks.lengths(num_rows)
    firsts = torch.tensor([0, *lengths], device=rows_R.device).cumsum(0)
    local: list[int] = torch.searchsorted(rows_R, firsts).tolist()  # of the sorted ones, where each rank's begin
    shares = [0, *accumulate(ranks.lengths(rows_R.shape[0]))]
    own, share = ((bounds[ranks.rank], bounds[ranks.rank + 1]) for bounds in (local, shares))
    sent = [_overlap(own, each) for each in pairwise(shares)]
    received = [_overlap(share, each) for each in pairwise(local)]
    index_N = rows_R[slice(*own)] - sum(lengths[: ranks.rank])
    states = ranks.hand_out(hidden_LD.index_select(0, index_N), sent, received)
    return tokens_R[order_R[slice(*share)]], states


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Length that two runs have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
