"""The weight of every token in the loss, by the aggregation of a record."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rft_algos.algorithms.published import Aggregation
from rft_algos.losses import aggregation as reductions
from rft_algos.losses.aggregation import Count


class Aggregated(Protocol):
    """A record that says what the mean over tokens is."""

    @property
    def aggregation(self) -> Aggregation: ...
    @property
    def max_tokens(self) -> int | None: ...


def token_weights(
    record: Aggregated,
    *,
    loss_mask_T: Tensor,
    segment_ids_T: Tensor,
    num_loss_tokens: Count,
    num_sequences: Count,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of every token in the loss, by the record's aggregation (`rft_algos.losses.aggregation`).

    Args:
        record: the algorithm.
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1, negative at padding.
        num_loss_tokens: loss tokens of the whole step.
        num_sequences: sequences of the whole step.
        dtype: of the weights.

    Returns:
        [T] weights, 0 where masked.
    """
    match record.aggregation:
        case "token_mean":
            return reductions.token_mean(loss_mask_T, num_loss_tokens, dtype=dtype)
        case "sequence_mean_token_mean":
            return reductions.sequence_mean_token_mean(loss_mask_T, segment_ids_T, num_sequences, dtype=dtype)
        case "sequence_mean_token_sum":
            return reductions.sequence_mean_token_sum(loss_mask_T, num_sequences, dtype=dtype)
        case "fixed_length":
            assert record.max_tokens is not None  # the record's constructor sees to it
            return reductions.fixed_length(loss_mask_T, num_sequences, record.max_tokens, dtype=dtype)
