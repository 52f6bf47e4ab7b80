"""Packed token sequences: the input of every forward that a trainer asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens among which each target was drawn, so that its probability is a share of theirs.

    Example: of the targets [8, 9], the first one drawn among 7 and 8 and the second one without a choice::

        AllowedTokens(ids_E=tensor([7, 8, 9]), counts_R=tensor([2, 1]))
    """

    ids_E: Tensor
    """[E] int64: the tokens of all targets, target after target; each at most once a target, itself among them."""
    counts_R: Tensor
    """[R] int64: how many there are for each target, at least 1."""

    def of_rows(self, rows_K: Tensor) -> AllowedTokens:
        """Return those of some of the targets, by their numbers [K] int64."""
        starts_R, counts_K = self.counts_R.cumsum(0) - self.counts_R, self.counts_R[rows_K]
        # the places of each target's tokens: its own start, and as many behind it as it has
        within_F = torch.arange(int(counts_K.sum()), device=rows_K.device)
        within_F = within_F - torch.repeat_interleave(counts_K.cumsum(0) - counts_K, counts_K)
        return AllowedTokens(self.ids_E[torch.repeat_interleave(starts_R[rows_K], counts_K) + within_F], counts_K)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """T tokens of several segments one after another, without padding; a segment sees nothing of another.

    Example: the segments [7, 8] and [9], of which the tokens 8 and 9 are targets::

        PackedTokens(tensor([7, 8, 9]), tensor([0, 1, 0]), tensor([0, 0, 1]), tensor([False, True, True]))
    """

    token_ids_T: Tensor
    """[T] int64."""
    positions_T: Tensor
    """[T] int64: the position of each token inside its segment."""
    segment_ids_T: Tensor
    """[T] int64; a segment ends where the id changes."""
    target_mask_T: Tensor | None = None
    """[T] bool: the tokens whose log-probability or value is computed; None: all of them."""
    mm_inputs: Sequence[Any] | None = None
    """The images of each segment in order, None for a segment without any; None: no segment has any."""
    allowed: AllowedTokens | None = None
    """What each of `targets_T` was drawn among, in their order; None: the whole vocabulary."""

    @classmethod
    def of_segments(cls, segments: Sequence[Tensor], *, mm_inputs: Sequence[Any] | None = None) -> PackedTokens:
        """Concatenate segments of token ids, [L] int64 each; every token is a target."""
        return cls(
            torch.cat(list(segments)),
            torch.cat([torch.arange(len(tokens), device=tokens.device) for tokens in segments]),
            torch.cat([torch.full_like(tokens, number) for number, tokens in enumerate(segments)]),
            mm_inputs=mm_inputs,
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of all segments."""
        return self.token_ids_T.shape[0]

    @property
    def predictable_T(self) -> Tensor:
        """[T] bool: the token before is of the same segment, so that there is something to predict this one from."""
        follows_T = torch.zeros_like(self.segment_ids_T, dtype=torch.bool)
        follows_T[1:] = self.segment_ids_T[1:] == self.segment_ids_T[:-1]
        return follows_T

    @property
    def targets_T(self) -> Tensor:
        """[T] bool: the targets that something predicts; a segment's first token is never among them."""
        if self.target_mask_T is None:
            return self.predictable_T
        return self.predictable_T & self.target_mask_T.to(torch.bool)
