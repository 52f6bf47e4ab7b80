"""Key-value caches of the decode forward.

Rows are independent sequences. Both caches take new rows at the end, advance all rows by one token
a step, and `keep` a subset in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class DecodeCache(Protocol):
    """Interface of the caches that an engine uses."""

    max_rows: int
    max_len: int

    @property
    def num_rows(self) -> int:
        """Number of active rows."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these (int64, ascending); they become rows 0, 1, ... in the same order."""
        ...

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` is (int64, repeats allowed); prompts stay in their order."""
        ...


def keys_and_values_bytes(num_layers: int, rows: int, num_kv_heads: int, length: int, head_dim: int, each: int) -> int:
    """2 x layers x rows x kv heads x length x head_dim values of `each` bytes."""
    return 2 * num_layers * rows * num_kv_heads * length * head_dim * each


class StaticCache:
    """Keys and values of `FastDecoder`: a prompt once for all its samples, and each row's own tokens.

    A step reads every key and value, and on a CPU waits for memory while it does; samples of one
    prompt share its columns, which leaves their own tokens to read. Per layer:

    - `prompt_keys`, `prompt_values` [P, G, Lp, D]: prompts in use, zero behind the shorter ones;
    - `keys`, `values` [max_rows, G, max_len, D]: column j of row r is its j-th token after the prompt,
      and zero up to the number of own tokens of the row that has most.

    Rows of a prompt are neighbours and prompts are in the order of their rows.
    """

    def __init__(
        self,
        num_layers: int,
        max_rows: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rows, self.max_len = max_rows, max_len
        shape = (max_rows, num_kv_heads, max_len, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        nothing = torch.empty((0, num_kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.prompt_keys = [nothing] * num_layers
        self.prompt_values = [nothing] * num_layers
        # On the CPU: the shapes of a step follow from these, and must not wait for a device.
        self.prompt_lengths_P = torch.empty(0, dtype=torch.int64)
        self.position_offsets_P = torch.empty(0, dtype=torch.int64)
        """Position of a token behind the prompt, minus its place: below 0 behind images on three axes."""
        self.prompt_of_row_B = torch.empty(0, dtype=torch.int64)
        self.own_lengths_B = torch.empty(0, dtype=torch.int64)
        self.layout = 0
        """Another number after every change of the rows."""
        self.blocks: tuple[int, list[Any]] = (-1, [])
        """Layout and blocks of its rows, see `row_groups`."""
        self.recording: object = None
        """The recording whose replays read this memory, see `cuda_graphs`."""

    @property
    def num_rows(self) -> int:
        """Number of active rows."""
        return self.own_lengths_B.shape[0]

    @property
    def lengths_B(self) -> Tensor:
        """Tokens of each row, prompt included."""
        return self.prompt_lengths_P[self.prompt_of_row_B] + self.own_lengths_B

    @property
    def positions_B(self) -> Tensor:
        """Position of each row's next token."""
        return self.lengths_B + self.position_offsets_P[self.prompt_of_row_B]

    def longest(self) -> int:
        """Return the number of tokens of the longest row, 0 without rows."""
        return int(self.lengths_B.max()) if self.num_rows else 0

    def longest_own(self) -> int:
        """Return the number of own tokens of the row that has most, 0 without rows."""
        return int(self.own_lengths_B.max()) if self.num_rows else 0

    def append(self, lengths_P: Tensor, copies_P: Tensor) -> None:
        """Claim `copies_P[p]` rows for each prompt (at least 1 each); `write_prompts` fills each layer."""
        num_rows = int(copies_P.sum())
        check_room(self.num_rows + num_rows, self.max_rows, int(lengths_P.max()), self.max_len)
        first, columns = self.num_rows, self.longest_own()
        for store in (*self.keys, *self.values) if columns else ():
            store[first : first + num_rows, :, :columns] = 0  # memory of former rows, which may contain NaN
        numbers_P = torch.arange(lengths_P.shape[0]) + self.prompt_lengths_P.shape[0]
        self.prompt_lengths_P = torch.cat([self.prompt_lengths_P, lengths_P])
        self.position_offsets_P = torch.cat([self.position_offsets_P, torch.zeros_like(lengths_P)])
        self.prompt_of_row_B = torch.cat([self.prompt_of_row_B, numbers_P.repeat_interleave(copies_P)])
        self.own_lengths_B = torch.cat([self.own_lengths_B, torch.zeros(num_rows, dtype=torch.int64)])
        self.layout += 1

    def shift_positions(self, offsets_P: Tensor) -> None:
        """Set the position offsets of the tokens behind the newest prompts."""
        self.position_offsets_P[self.position_offsets_P.shape[0] - offsets_P.shape[0] :] = offsets_P

    def write_prompts(self, layer: int, keys_PGLD: Tensor, values_PGLD: Tensor) -> None:
        """Write the newest prompts' keys and values of one layer, zero behind the shorter ones."""
        for store, new in ((self.prompt_keys, keys_PGLD), (self.prompt_values, values_PGLD)):
            old = store[layer]
            columns = max(old.shape[2], new.shape[2])
            # an empty cache takes the new tensors as they are, without a copy
            store[layer] = torch.cat([_lengthen(old, columns), _lengthen(new, columns)]) if old.shape[0] else new

    def clear_next_column(self) -> None:
        """Zero the column that the rows with most own tokens write next, in the rows that have fewer.

        Such a column is masked, and weight 0 times what a former row left there must be 0: after
        a step with broken weights it could be NaN.
        """
        column = self.longest_own()
        if int(self.own_lengths_B.min()) < column:
            for store in (*self.keys, *self.values):
                store[: self.num_rows, :, column] = 0

    def clear_columns(self, multiple: int) -> int:
        """Zero what no row has written yet, up to the next whole number of `multiple` columns; returns that number."""
        column = self.longest_own()
        end = min((column // multiple + 1) * multiple, self.max_len)
        for store in (*self.keys, *self.values):
            store[: self.num_rows, :, column:end] = 0
        return end

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Drop every row but these (int64, ascending); only rows that move are copied."""
        rows = rows.to("cpu")
        check_ascending(rows, self.num_rows)
        # rows ascend, so all before the first gap stay where they are
        moved = int((rows == torch.arange(rows.shape[0])).sum())
        self.own_lengths_B = self.own_lengths_B[rows]
        used_Q, self.prompt_of_row_B = torch.unique_consecutive(self.prompt_of_row_B[rows], return_inverse=True)
        if used_Q.shape[0] < self.prompt_lengths_P.shape[0]:
            self._keep_prompts(used_Q)
        self.layout += 1
        sources, live = rows[moved:].to(self.keys[0].device), self.longest_own()
        if not sources.shape[0] or not live:
            return
        for store in (*self.keys, *self.values):
            store[moved : rows.shape[0], :, :live] = store[sources, :, :live]

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` is (int64, repeats allowed); prompts stay in their order."""
        rows = rows.to("cpu")
        check_places(rows, self.num_rows, self.max_rows)
        prompt_of_row_B = self.prompt_of_row_B[rows]
        if bool((prompt_of_row_B[1:] < prompt_of_row_B[:-1]).any()):
            raise ValueError(f"prompts must stay in their order, got rows {rows.tolist()[:20]}")
        live = self.longest_own()
        sources = rows.to(self.keys[0].device)
        for store in (*self.keys, *self.values) if live else ():
            store[: rows.shape[0], :, :live] = store[sources, :, :live]  # the right side is a copy
        self.own_lengths_B = self.own_lengths_B[rows]
        used_Q, self.prompt_of_row_B = torch.unique_consecutive(prompt_of_row_B, return_inverse=True)
        if used_Q.shape[0] < self.prompt_lengths_P.shape[0]:
            self._keep_prompts(used_Q)
        self.layout += 1

    def _keep_prompts(self, used_Q: Tensor) -> None:
        self.prompt_lengths_P = self.prompt_lengths_P[used_Q]
        self.position_offsets_P = self.position_offsets_P[used_Q]
        # the prompts that are left may all be shorter: the memory behind them is given back
        columns = int(self.prompt_lengths_P.max()) if used_Q.shape[0] else 0
        index = used_Q.to(self.keys[0].device)
        self.prompt_keys = [layer[index, :, :columns] for layer in self.prompt_keys]
        self.prompt_values = [layer[index, :, :columns] for layer in self.prompt_values]


def _lengthen(layer_PGLD: Tensor, columns: int) -> Tensor:
    missing = columns - layer_PGLD.shape[2]
    return torch.nn.functional.pad(layer_PGLD, (0, 0, 0, missing)) if missing else layer_PGLD


class GrowingCache:
    """Keys and values of `HfDecoder`: rows end at a common last column, zeros to the left of the shorter ones.

    Every row's tokens are consecutive columns, so a distance in columns is a distance in tokens
    and a sliding-window mask that transformers makes from columns is exact.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.max_rows, self.max_len = max_rows, max_len
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = torch.empty(0, dtype=torch.int64)
        self.offsets = torch.empty(0, dtype=torch.int64)
        """[B] of each row, see `StaticCache.position_offsets_P`."""

    @property
    def num_rows(self) -> int:
        """Number of active rows."""
        return self.lengths.shape[0]

    @property
    def num_columns(self) -> int:
        """Columns in use: the length of the longest row."""
        return self.keys[0].shape[2] if self.keys else 0

    def append(self, keys: list[Tensor], values: list[Tensor], lengths_B: Tensor, offsets_B: Tensor) -> None:
        """Add right-aligned rows [B, G, L, D] of these lengths, one tensor a layer."""
        check_room(self.num_rows + lengths_B.shape[0], self.max_rows, int(lengths_B.max()), self.max_len)
        self.keys = _join(self.keys, keys) if self.num_rows else keys
        self.values = _join(self.values, values) if self.num_rows else values
        self.lengths = torch.cat([self.lengths, lengths_B])
        self.offsets = torch.cat([self.offsets, offsets_B])

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Drop every row but these (int64, ascending), and the columns that none of them uses."""
        rows = rows.to("cpu")
        check_ascending(rows, self.num_rows)
        self.lengths, self.offsets = self.lengths[rows], self.offsets[rows]
        # rows end at the last column, so what no row uses is at the left
        unused = self.num_columns - (int(self.lengths.max()) if rows.shape[0] else 0)
        index = rows.to(self.keys[0].device) if self.keys else rows
        self.keys = [layer[index, :, unused:] for layer in self.keys]
        self.values = [layer[index, :, unused:] for layer in self.values]

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` is (int64, repeats allowed)."""
        rows = rows.to("cpu")
        check_places(rows, self.num_rows, self.max_rows)
        self.lengths, self.offsets = self.lengths[rows], self.offsets[rows]
        index = rows.to(self.keys[0].device) if self.keys else rows
        self.keys = [layer[index] for layer in self.keys]
        self.values = [layer[index] for layer in self.values]


def _join(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    columns = max(old[0].shape[2], new[0].shape[2])
    return [torch.cat([_widen(a, columns), _widen(b, columns)]) for a, b in zip(old, new, strict=True)]


def _widen(layer_BGLD: Tensor, columns: int) -> Tensor:
    missing = columns - layer_BGLD.shape[2]
    return torch.nn.functional.pad(layer_BGLD, (0, 0, missing, 0)) if missing else layer_BGLD


def dynamic_layers(cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and values of a transformers cache, one tensor a layer."""
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def check_room(num_rows: int, max_rows: int, length: int, max_len: int) -> None:
    """Raise `ValueError` where a cache would hold more rows or longer rows than it was made for."""
    if num_rows > max_rows or length > max_len:
        raise ValueError(f"the cache holds {max_rows} rows of {max_len} tokens, asked for {num_rows} of {length}")


def check_places(rows: Tensor, num_rows: int, max_rows: int) -> None:
    """Raise `ValueError` where `rows` names a row that is not there, or more rows than fit."""
    outside = rows.shape[0] and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows
    if rows.dim() != 1 or outside or rows.shape[0] > max_rows:
        raise ValueError(f"{max_rows} rows fit, and rows are 0 .. {num_rows - 1}; got {rows.tolist()[:20]}")


def check_ascending(rows: Tensor, num_rows: int) -> None:
    """Raise `ValueError` where `rows` is not an ascending choice of the active rows."""
    good = rows.dim() == 1 and bool((rows[1:] > rows[:-1]).all())
    if not good or (rows.shape[0] and (int(rows[0]) < 0 or int(rows[-1]) >= num_rows)):
        raise ValueError(f"rows to keep must ascend within 0 .. {num_rows - 1}, got {rows.tolist()[:20]}")
