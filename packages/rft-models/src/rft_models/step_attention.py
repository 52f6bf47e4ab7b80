"""Attention of one new token a row over a `StaticCache`: shared prompt columns first, own columns after them."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_models.cache import StaticCache


class StepAttention:
    """softmax(scaling q k^T + mask) v for B rows with one query each; made once a step, called for every layer.

    The scores of a row are those of its prompt's columns and those of its own columns side by
    side. For the prompt part the queries of all samples of a prompt are one matrix, so a prompt's
    keys are read once and not once a sample. Batched products and not a fused kernel: a fused
    kernel pays a fixed cost for every row and head, three times the time of these at 512 rows and
    100 columns on a CPU.
    """

    def __init__(self, cache: StaticCache, num_kv_heads: int, scaling: float) -> None:
        self._cache, self._num_kv_heads, self._scaling = cache, num_kv_heads, scaling
        self._own_columns = int(cache.own_lengths_B.max()) + 1
        self._masks: dict[int | None, Tensor | None] = {}

    def __call__(self, layer: int, query_BHD: Tensor, sliding_window: int | None) -> Tensor:
        """[B, H * D]. The new token's key and value are in the cache already."""
        num_rows, num_heads, width = query_BHD.shape
        batch, group = num_rows * self._num_kv_heads, num_heads // self._num_kv_heads
        own = (slice(num_rows), slice(None), slice(self._own_columns))
        keys = self._cache.keys[layer][own].flatten(0, 1)
        values = self._cache.values[layer][own].flatten(0, 1)
        prompt_keys = self._cache.prompt_keys[layer].flatten(0, 1)
        prompt_values = self._cache.prompt_values[layer].flatten(0, 1)

        query = query_BHD.reshape(batch, group, width)
        scores = torch.cat(
            [
                self._to_rows(torch.bmm(self._to_prompts(query), prompt_keys.transpose(1, 2))),
                torch.bmm(query, keys.transpose(1, 2)),
            ],
            -1,
        ).mul_(self._scaling)
        mask = self._mask(sliding_window)
        if mask is not None:
            scores.view(num_rows, -1, scores.shape[-1]).add_(mask)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        columns = prompt_keys.shape[1]
        attended = self._to_rows(torch.bmm(self._to_prompts(weights[..., :columns]), prompt_values))
        attended = torch.baddbmm(attended, weights[..., columns:], values)
        return attended.view(num_rows, -1)

    def _to_prompts(self, tensor: Tensor) -> Tensor:
        """[B * G, g, X] -> [P * G, group_size * g, X]: the rows of a prompt side by side, zeros for absent ones."""
        cache, (_, group, width) = self._cache, tensor.shape
        rows = tensor.reshape(cache.num_rows, -1)
        num_prompts = cache.prompt_lengths_P.shape[0]
        if cache.place_B is not None:
            rows = rows.new_zeros(num_prompts * cache.group_size, rows.shape[1]).index_copy_(0, cache.place_B, rows)
        by_prompt = rows.view(num_prompts, cache.group_size, self._num_kv_heads, group, width)
        return by_prompt.transpose(1, 2).reshape(num_prompts * self._num_kv_heads, -1, width)

    def _to_rows(self, tensor: Tensor) -> Tensor:
        """The inverse: [P * G, group_size * g, X] -> [B * G, g, X]."""
        cache, width = self._cache, tensor.shape[-1]
        num_prompts = cache.prompt_lengths_P.shape[0]
        by_prompt = tensor.view(num_prompts, self._num_kv_heads, cache.group_size, -1, width).transpose(1, 2)
        group = by_prompt.shape[3]
        rows = by_prompt.reshape(num_prompts * cache.group_size, -1)
        if cache.place_B is not None:
            rows = rows.index_select(0, cache.place_B)
        return rows.reshape(cache.num_rows * self._num_kv_heads, group, width)

    def _mask(self, sliding_window: int | None) -> Tensor | None:
        """[B, 1, prompt columns + own columns], 0 where seen and -inf elsewhere; None where all is seen."""
        cache = self._cache
        total = int(cache.prompt_lengths_P.max()) + self._own_columns
        window = sliding_window if sliding_window is not None and sliding_window < total else None
        if window not in self._masks:
            prompt_B1 = cache.prompt_lengths_P[cache.prompt_of_row_B][:, None]
            own_B1 = cache.own_lengths_B[:, None]
            column_C = torch.arange(cache.prompt_keys[0].shape[2])
            own_column_C = torch.arange(self._own_columns)
            hidden_BC = torch.cat([column_C >= prompt_B1, own_column_C > own_B1], 1)
            if window is not None:
                position_BC = torch.cat([column_C.expand(cache.num_rows, -1), prompt_B1 + own_column_C], 1)
                hidden_BC |= position_BC <= prompt_B1 + own_B1 - window
            self._masks[window] = self._as_scores(hidden_BC)
        return self._masks[window]

    def _as_scores(self, hidden_BC: Tensor) -> Tensor | None:
        if not bool(hidden_BC.any()):
            return None
        like = self._cache.keys[0]
        mask = torch.zeros(hidden_BC.shape, dtype=like.dtype).masked_fill_(hidden_BC, -torch.inf)
        return mask[:, None].to(like.device)
