"""Noise on the embeddings while a model is fine-tuned (NEFTune): every entry + u alpha / sqrt(L D).

u is uniform in [-1, 1), L the number of tokens of the sample and D the width of the embeddings. An entry of the noise
is a function of the key (seed and purpose), the number of the optimizer step, the tokens of the sample, the place in it
and the column: no split of a batch, no number of ranks and no resume changes it. It acts in training mode where
gradients are taken, and nowhere else, so that evaluations and engines compute the model without noise.

Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv 2310.05914), algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rft_models.keyed_masks.keyed_words import GOLDEN, mix, shift_right

_BITS = 24


class NoiseRows(NamedTuple):
    """Keys and sizes from which the noise of the tokens of a row is drawn."""

    keys_K: Tensor
    """[K] int64, one a token."""
    scales_K: Tensor
    """[K] float32: alpha / sqrt(L), L the tokens of its sample."""

    def select(self, places: Tensor | slice) -> NoiseRows:
        """Select the tokens at these indices, in their order."""
        return NoiseRows(self.keys_K[places], self.scales_K[places])

    def added_to(self, embedded_KD: Tensor) -> Tensor:
        """[..., D] embeddings with their noise."""
        width = embedded_KD.shape[-1]
        columns_D = torch.arange(width, device=embedded_KD.device) * GOLDEN
        words = mix(mix(self.keys_K)[..., None] + columns_D)
        # the middle of each of 2^24 cells of [-1, 1): the mean is exactly 0
        uniform = (shift_right(words, 64 - _BITS).to(torch.float32) + 0.5) * 2.0 ** (1 - _BITS) - 1.0
        noise = uniform * (self.scales_K * width**-0.5)[..., None]
        return embedded_KD + noise.to(embedded_KD.dtype)


class EmbeddingNoise:
    """The noise of a run; `update` is set to the number of the optimizer step before its forwards."""

    def __init__(self, alpha: float, key: int) -> None:
        self.alpha = alpha
        self.update = 0
        """Number of the optimizer step whose gradients are being taken."""
        self._key = key

    def rows(self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor) -> NoiseRows:
        """Return keys and scales of the tokens of a packed row; equal samples of a step have equal noise."""
        begins_T = torch.ones_like(segment_ids_T, dtype=torch.bool)
        begins_T[1:] = segment_ids_T[1:] != segment_ids_T[:-1]
        segments_T = begins_T.cumsum(0) - 1
        words_T = mix(token_ids_T.to(torch.int64) * GOLDEN + positions_T)
        sums_S = torch.zeros_like(words_T).index_add_(0, segments_T, words_T)
        lengths_S = torch.zeros_like(words_T).index_add_(0, segments_T, torch.ones_like(words_T))
        keys_T = mix(sums_S[segments_T] + mix(positions_T * GOLDEN + self.update) + self._key)
        return NoiseRows(keys_T, self.alpha * lengths_S[segments_T].to(torch.float32) ** -0.5)
