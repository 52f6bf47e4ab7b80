"""Attention over sequences of several lengths in one call, for kernels that take them concatenated.

Such a kernel takes the start of each sequence's queries and keys (`starts`, counted from 0, with the total at the
end) and aligns the last query with the last key: with L queries and K >= L keys, query i sees the keys up to
K - L + i. So the own tokens of a segment see all of a shared prompt that stands before their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rft_core.device_copies import to_device


class VarlenKernel(Protocol):
    """Fused kernel over concatenated sequences; `attention.kernels` chooses it."""

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        """Return true where the kernel computes attention of these tensors with these settings."""
        ...

    def __call__(
        self,
        query_THD: Tensor,
        key_SGD: Tensor,
        value_SGD: Tensor,
        sequences: Sequences,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """[T, H, D]: causal inside each sequence, aligned at its end; settings as for `packed_attention`."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries `start` to `start + length` of a row, which see `prefix_length` keys from `prefix_start` and their own.

    Example: the 4 own tokens at 9 of a segment whose prompt is 0 to 9: `Piece(9, 4, 0, 9)`.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Starts and lengths of N sequences, as kernels take them."""

    query_starts_N1: Tensor
    """[N + 1] int32."""
    key_starts_N1: Tensor
    """[N + 1] int32."""
    longest_query: int
    longest_key: int
    key_places_S: Tensor | None
    """[S] int64: the row's tokens whose keys stand at the S places; None: the row as it is."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Sequences:
        """Build the sequences of pieces that cover a row in order."""
        key_lengths = [piece.prefix_length + piece.length for piece in pieces]
        key_indices: Tensor | None = None
        # keys are copied only where a prompt is shared: its keys then stand before those of each of its segments
        if any(piece.prefix_length for piece in pieces):
            runs = [
                torch.arange(start, start + length)
                for piece in pieces
                for start, length in ((piece.prefix_start, piece.prefix_length), (piece.start, piece.length))
            ]
            key_indices = to_device(torch.cat(runs), device)
        return cls(
            _starts([piece.length for piece in pieces], device),
            _starts(key_lengths, device),
            max(piece.length for piece in pieces),
            max(key_lengths),
            key_indices,
        )


def varlen_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    sequences: Sequences,
    kernel: VarlenKernel,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`packed_attention` or `shared_attention` of a row in one call of `kernel`; [T, H, D]."""
    index_S = sequences.key_places_S
    # again in every layer: the places stay, keys and values do not
    if index_S is not None:
        key_TGD, value_TGD = key_TGD.index_select(0, index_S), value_TGD.index_select(0, index_S)
    return kernel(
        query_THD,
        key_TGD,
        value_TGD,
        sequences,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device)
