"""Attention of one new token a row over a `StaticCache`: shared prompt columns first, own columns after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rft_models.decode.kv_cache import StaticCache
from rft_models.decode.row_groups import RowBlock, as_scores


class StepAttention:
    """softmax(scaling q k^T + mask) v for B rows with one query each; made once a step, called for every layer.

    The scores of a row are those of its prompt's columns and those of its own columns side by
    side. For the prompt part the queries of all samples of a prompt are one matrix, so a prompt's
    keys are read once and not once a sample. Batched products and not a fused kernel: a fused
    kernel pays a fixed cost for every row and head, three times the time of these at 512 rows and
    100 columns on a CPU. Rows of very different lengths are computed in blocks, see `row_groups`.
    """

    def __init__(self, cache: StaticCache, num_kv_heads: int, scaling: float, blocks: Sequence[RowBlock]) -> None:
        """Prepare one step; `blocks` cover all rows of the cache, in order."""
        self._num_kv_heads = num_kv_heads
        self._blocks = [BlockAttention(cache, block, num_kv_heads, scaling) for block in blocks]

    @property
    def even_column(self) -> int | None:
        """The column that every row of the cache writes next, known on the host; None where they differ."""
        columns = {block.even_column for block in self._blocks}
        return columns.pop() if len(columns) == 1 else None

    def __call__(self, layer: int, query_BHD: Tensor, sliding_window: int | None) -> Tensor:
        """Compute the attention of all rows, [B, H * D]; the cache contains the new token's key and value already."""
        if len(self._blocks) == 1:
            return self._blocks[0](layer, query_BHD, sliding_window)
        return torch.cat([block(layer, query_BHD[block.rows], sliding_window) for block in self._blocks])


class BlockAttention:
    """`StepAttention` for one block; its B rows and P prompts are those of the block."""

    def __init__(self, cache: StaticCache, block: RowBlock, num_kv_heads: int, scaling: float) -> None:
        self.rows = block.rows
        self._cache, self._block, self._num_kv_heads, self._scaling = cache, block, num_kv_heads, scaling
        own_B = cache.own_lengths_B[block.rows]
        self._own_columns = int(own_B.max()) + 1
        self._is_even = int(own_B.min()) == self._own_columns - 1
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def even_column(self) -> int | None:
        """The column that every row of the block writes next, known on the host; None where they differ."""
        return self._own_columns - 1 if self._is_even else None

    def __call__(self, layer: int, query_BHD: Tensor, sliding_window: int | None) -> Tensor:
        """Compute the attention of the block's rows, [B, H * D]."""
        block, cache = self._block, self._cache
        num_rows, num_heads, width = query_BHD.shape
        batch, group = num_rows * self._num_kv_heads, num_heads // self._num_kv_heads
        own = (block.rows, slice(None), slice(self._own_columns))
        shared = (block.prompts, slice(None), slice(block.prompt_columns))
        keys, values = cache.keys[layer][own].flatten(0, 1), cache.values[layer][own].flatten(0, 1)
        prompt_keys = cache.prompt_keys[layer][shared].flatten(0, 1)
        prompt_values = cache.prompt_values[layer][shared].flatten(0, 1)

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
            # a mask may end with the prompt's columns: own columns of equal length are all seen
            scores.view(num_rows, -1, scores.shape[-1])[..., : mask.shape[-1]].add_(mask)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        columns = block.prompt_columns
        attended = self._to_rows(torch.bmm(self._to_prompts(weights[..., :columns]), prompt_values))
        attended = torch.baddbmm(attended, weights[..., columns:], values)
        return attended.view(num_rows, -1)

    @property
    def _num_prompts(self) -> int:
        return self._block.prompts.stop - self._block.prompts.start

    @property
    def _num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def _to_prompts(self, tensor: Tensor) -> Tensor:
        """[B * G, g, X] -> [P * G, group_size * g, X]: the rows of a prompt side by side, zeros for absent ones."""
        block, (_, group, width) = self._block, tensor.shape
        if block.place_B is not None:
            rows = tensor.reshape(self._num_rows, -1)
            padded = rows.new_zeros(self._num_prompts * block.group_size, rows.shape[1])
            tensor = padded.index_copy_(0, block.place_B, rows)
        # a view of columns that stand among others too, so that they are copied once
        by_prompt = tensor.view(self._num_prompts, block.group_size, self._num_kv_heads, group, width)
        return by_prompt.transpose(1, 2).reshape(self._num_prompts * self._num_kv_heads, -1, width)

    def _to_rows(self, tensor: Tensor) -> Tensor:
        """Invert `_to_prompts`: [P * G, group_size * g, X] -> [B * G, g, X]."""
        block, width = self._block, tensor.shape[-1]
        by_prompt = tensor.view(self._num_prompts, self._num_kv_heads, block.group_size, -1, width).transpose(1, 2)
        group = by_prompt.shape[3]
        rows = by_prompt.reshape(self._num_prompts * block.group_size, -1)
        if block.place_B is not None:
            rows = rows.index_select(0, block.place_B)
        return rows.reshape(self._num_rows * self._num_kv_heads, group, width)

    def _mask(self, sliding_window: int | None) -> Tensor | None:
        """[B, 1, first columns], 0 where seen and -inf elsewhere; None where all is seen."""
        cache, columns = self._cache, self._block.prompt_columns
        total = columns + self._own_columns
        window = sliding_window if sliding_window is not None and sliding_window < total else None
        # the block's own mask is made once a change of rows, the others below once a step
        if window is None and self._is_even:
            return self._block.prompt_mask
        if window not in self._masks:
            prompt_B1 = cache.prompt_lengths_P[cache.prompt_of_row_B[self.rows]][:, None]
            own_B1 = cache.own_lengths_B[self.rows][:, None]
            hidden_BC = hidden_columns(prompt_B1, own_B1, columns, self._own_columns, window)
            self._masks[window] = as_scores(hidden_BC, cache.keys[0]) if bool(hidden_BC.any()) else None
        return self._masks[window]


def hidden_columns(
    prompt_B1: Tensor, own_B1: Tensor, prompt_columns: int, own_columns: int, window: int | None
) -> Tensor:
    """[B, prompt columns + own columns] bool: what a row does not see, by tokens of its prompt and of its own."""
    column_C = torch.arange(prompt_columns, device=prompt_B1.device)
    own_column_C = torch.arange(own_columns, device=prompt_B1.device)
    hidden_BC = torch.cat([column_C >= prompt_B1, own_column_C > own_B1], 1)
    if window is not None:
        position_BC = torch.cat([column_C.expand(prompt_B1.shape[0], -1), prompt_B1 + own_column_C], 1)
        hidden_BC |= position_BC <= prompt_B1 + own_B1 - window
    return hidden_BC
