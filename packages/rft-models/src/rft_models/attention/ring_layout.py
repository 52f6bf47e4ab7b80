"""Zigzag layout of a packed row over a ring of ranks: the rows of each rank, and the keys each row sees.

A row that stands late sees more keys than one that stands early, so a rank that had a run of neighbours would have
nothing to do while the last one computes. Every rank therefore holds two runs, one from the front and one from the
back (Brandon et al., "Striped Attention", arXiv 2311.09431, states the problem; the two runs are those of Llama 3's
context parallelism, arXiv 2407.21783, section 3.3.2): equal rows, and for one long segment equal work up to a tile.

Shape letters: K rows of the whole, L of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rft_models.attention.varlen import Piece

TILE = 512
"""Rows of queries and of keys whose scores exist at a time: 1 MiB a head in float32."""


def zigzag(lengths: Sequence[int]) -> Tensor:
    """[K] int64: the rows of rank 0, then those of rank 1, ..., for ranks of so many rows each.

    Example: `zigzag([4, 4])` is [0, 1, 6, 7, 2, 3, 4, 5].
    """
    front, behind = 0, sum(lengths)
    runs: list[Tensor] = []
    for length in lengths:
        early, late = length - length // 2, length // 2
        runs += [torch.arange(front, front + early), torch.arange(behind - late, behind)]
        front, behind = front + early, behind - late
    return torch.cat(runs)


def inverse(order_K: Tensor) -> Tensor:
    """[K] int64: where each row stands in the order."""
    place_K = torch.empty_like(order_K)
    place_K[order_K] = torch.arange(order_K.shape[0], device=order_K.device)
    return place_K


@dataclass(frozen=True, slots=True)
class CausalSpan:
    """Keys that each row sees: `prefix_first` .. `prefix_behind` - 1, and `own_first` .. itself; [K] int64 each."""

    prefix_first: Tensor
    prefix_behind: Tensor
    own_first: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Piece], sliding_window: int | None, device: torch.device | str = "cpu") -> CausalSpan:
        """Build the spans of pieces that cover a row in order; window w: a row sees itself and the w - 1 before it."""
        lengths = torch.tensor([piece.length for piece in pieces])

        def each(values: Sequence[int]) -> Tensor:
            return torch.tensor(values).repeat_interleave(lengths)

        start, prefix_length = each([p.start for p in pieces]), each([p.prefix_length for p in pieces])
        prefix_start = each([p.prefix_start for p in pieces])
        lowest = torch.zeros_like(start)
        if sliding_window is not None:
            # counted along the segment: in the row the prompt may be far from the segment's own tokens
            position = prefix_length + torch.arange(start.shape[0]) - start
            lowest = (position - sliding_window + 1).clamp(min=0)
        bounds = (
            prefix_start + torch.minimum(lowest, prefix_length),
            prefix_start + prefix_length,
            start + (lowest - prefix_length).clamp(min=0),
        )
        return cls(*(tensor.to(device) for tensor in bounds))

    def mask(self, rows_Q: Tensor, keys_C: Tensor) -> Tensor:
        """[Q, C] bool: whether the row sees the key."""
        row_Q1, key_1C = rows_Q[:, None], keys_C[None, :]
        own = torch.logical_and(key_1C >= self.own_first[rows_Q][:, None], key_1C <= row_Q1)
        after = key_1C >= self.prefix_first[rows_Q][:, None]
        return own | torch.logical_and(after, key_1C < self.prefix_behind[rows_Q][:, None])


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `query` of this rank's rows against keys `keys` of another's."""

    query: slice
    keys: slice
    is_whole: bool
    """Whether every query sees every key, so that no mask is needed."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring rows first .. last at places start .. stop - 1 of a rank."""

    start: int
    stop: int
    first: int

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start - 1


@dataclass(slots=True)
class RingRow:
    """A packed row laid out for a ring of ranks; made once a forward, used by every layer."""

    pieces: Sequence[Piece]
    lengths: Sequence[int]
    """Rows of each rank."""
    rank: int
    order_K: Tensor
    """See `zigzag`; on the device that computes."""
    tile: int = TILE
    _sights: dict[int | None, CausalSpan] = field(default_factory=dict)
    _tiles: dict[tuple[int, int | None], list[Tile]] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Piece], lengths: Sequence[int], rank: int, device: torch.device) -> RingRow:
        """Lay out pieces that cover the row in order."""
        return cls(pieces, lengths, rank, zigzag(lengths).to(device))

    def rows_of(self, rank: int) -> Tensor:
        """[L] int64: the rows of a rank."""
        first = sum(self.lengths[:rank])
        return self.order_K[first : first + self.lengths[rank]]

    def sight(self, sliding_window: int | None) -> CausalSpan:
        """Return the keys that each row sees, on the device that computes."""
        if sliding_window not in self._sights:
            self._sights[sliding_window] = CausalSpan.of(self.pieces, sliding_window, self.order_K.device)
        return self._sights[sliding_window]

    def tiles(self, source: int, sliding_window: int | None) -> list[Tile]:
        """Return the tiles of this rank's queries and the keys of `source` in which anything is seen."""
        key = source, sliding_window
        if key not in self._tiles:
            # on the host, where tiles become slices: no layer waits for the device to learn its tiles
            sight = CausalSpan.of(self.pieces, sliding_window)
            self._tiles[key] = _seen_tiles(sight, self._runs(self.rank), self._runs(source))
        return self._tiles[key]

    def _runs(self, rank: int) -> list[_Run]:
        """Return the rank's rows, cut so that each run is one of neighbours and at most a tile."""
        length = self.lengths[rank]
        fronts = list(accumulate((n - n // 2 for n in self.lengths), initial=0))
        early, first_late = fronts[rank + 1] - fronts[rank], sum(self.lengths)
        first_late -= sum(n // 2 for n in self.lengths[: rank + 1])
        halves = [(0, early, fronts[rank]), (early, length, first_late)]
        return [
            _Run(start, min(start + self.tile, stop), first + start - begin)
            for begin, stop, first in halves
            for start in range(begin, stop, self.tile)
        ]


def _seen_tiles(sight: CausalSpan, query_runs: Sequence[_Run], key_runs: Sequence[_Run]) -> list[Tile]:
    tiles: list[Tile] = []
    for run in query_runs:
        rows = slice(run.first, run.last + 1)
        own = sight.own_first[rows]
        first, behind = sight.prefix_first[rows], sight.prefix_behind[rows]
        own_lowest, own_highest = int(own.min()), int(own.max())
        prefix_lowest, prefix_highest = int(first.min()), int(first.max())
        behind_lowest, behind_highest = int(behind.min()), int(behind.max())
        for keys in key_runs:
            seen_own = keys.first <= run.last and keys.last >= own_lowest
            seen_prefix = keys.first < behind_highest and keys.last >= prefix_lowest
            if not (seen_own or seen_prefix):
                continue
            # keys that are seen partly as prompt and partly as own get a mask all the same, which costs time alone
            whole_own = keys.last <= run.first and keys.first >= own_highest
            whole_prefix = keys.first >= prefix_highest and keys.last < behind_lowest
            tile = Tile(slice(run.start, run.stop), slice(keys.start, keys.stop), whole_own or whole_prefix)
            tiles.append(tile)
    return tiles
