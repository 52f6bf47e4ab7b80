"""Dropout whose masks follow from the samples, so that no split of a batch and no resume changes them.

The mask of an entry is a function of the seed, the layer, the number of the optimizer step, the tokens of the sample,
the place in it and the column. It acts in training mode where gradients are taken, and nowhere else: log-probabilities
that are only read (evaluation, the policy at the start of a step, a reference) and what engines compute are those of
the model without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rft_models.keyed_masks.keyed_words import GOLDEN, mix, shift_right

_BITS = 24


class RowKeys:
    """Keys of the rows of the current forward, from which masks are drawn; set by a hook before the decoder runs."""

    def __init__(self) -> None:
        self.update = 0
        """Number of the optimizer step whose gradients are being taken."""
        self.keys_T: Tensor | None = None

    def hook(self, _: nn.Module, __: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Compute one key for each row of the packed row, from its sample's tokens, its position and the step."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if not torch.is_grad_enabled():
            return
        # never those of another forward: of the same length, their masks would pass for this one's
        self.keys_T = None
        if ids is None or positions is None:
            return
        tokens_T, positions_T = ids[0].to(torch.int64), positions[0].to(torch.int64)
        # a sample begins where positions do; its sum of words is the same in any row that it is packed into
        segments_T = (positions_T == 0).cumsum(0)
        words_T = mix(tokens_T * GOLDEN + positions_T)
        samples_S = torch.zeros(tokens_T.shape[0] + 1, dtype=torch.int64, device=ids.device)
        samples_S.index_add_(0, segments_T, words_T)
        # kept until the next forward: layers that the backward pass computes again need the same masks
        self.keys_T = mix(samples_S[segments_T] + mix(positions_T * GOLDEN + self.update))


class KeyedDropout(nn.Dropout):
    """y = x keep / (1 - p) with `keep` from the rows' keys; the identity without gradients."""

    def __init__(self, p: float, key: int, rows: RowKeys) -> None:
        super().__init__(p)
        self._key = key
        self._rows = rows

    def forward(self, input: Tensor) -> Tensor:
        """Zero entries of the inputs [1, T, K] of one packed row and rescale the others."""
        if not (self.training and torch.is_grad_enabled()):
            return input
        keys_T = self._rows.keys_T
        assert keys_T is not None, "dropout before the rows have keys"
        assert input.shape[-2] == keys_T.shape[0], "dropout of other rows than those that have keys"
        columns_K = torch.arange(input.shape[-1], device=input.device) * GOLDEN
        words_TK = mix(mix(keys_T + self._key)[:, None] + columns_K)
        keep_TK = shift_right(words_TK, 64 - _BITS) >= round(self.p * 2**_BITS)
        return input * keep_TK.to(input.dtype) / (1 - self.p)
