"""Test doubles: a decodable model whose logits are a table.

The logits after a token depend on a number that a row carries along, `state = (carry x state +
token + 1) mod num_states`, which starts at 0 and takes in every token of the row. With carry 0 and one
state a token the table is a bigram. With carry above 0 the whole history counts, so an engine
that mixes up rows, or feeds a token twice, draws from a wrong line of the table. The images of a prompt are a number:
the state that it starts in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rft_engine.typed_lists import to_ints


@dataclass(slots=True)
class FakeCache:
    """One state number and one length a row; refuses what a real cache has no room for."""

    max_rows: int
    max_len: int
    states_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    lengths_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def num_rows(self) -> int:
        return self.states_B.numel()

    def keep(self, rows: Tensor) -> None:
        assert rows.dtype == torch.int64, f"rows must be int64: {rows.dtype}"
        assert bool((rows.diff() > 0).all()), f"rows must ascend: {rows}"
        self.select(rows)

    def select(self, rows: Tensor) -> None:
        assert rows.numel() <= self.max_rows, f"{rows.numel()} rows, {self.max_rows} fit"
        self.states_B = self.states_B[rows]
        self.lengths_B = self.lengths_B[rows]


@dataclass
class FakeDecodableModel:
    """Table model. `log_SV[s]` are the logits in state s; `calls` lists what the engine asked for.

    Example::

        model = FakeDecodableModel(torch.randn(11, 5), carry=3)
        bigram = FakeDecodableModel.bigram(torch.randn(5, 5))
    """

    log_SV: Tensor
    carry: int = 0
    max_positions: int = 4096
    num_refreshes: int = 0
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list[tuple[str, tuple[int, ...]]])
    """("prefill", copies of each prompt), ("step", (rows,)) or ("new_cache", (max_rows, max_len))."""

    @classmethod
    def bigram(cls, log_VV: Tensor) -> FakeDecodableModel:
        """Row v holds the logits after token v."""
        return cls(log_VV.roll(1, dims=0))

    @property
    def vocab_size(self) -> int:
        return self.log_SV.shape[1]

    def new_cache(self, max_rows: int, max_len: int) -> FakeCache:
        self.calls.append(("new_cache", (max_rows, max_len)))
        return FakeCache(max_rows, max_len)

    def prefill(
        self,
        cache: FakeCache,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        self.calls.append(("prefill", tuple(copies_P)))
        assert cache.num_rows + sum(copies_P) <= cache.max_rows, "more rows than the cache holds"
        assert int(lengths_P.max()) <= cache.max_len, "a prompt longer than the cache"
        starts = [0] * len(token_ids_PL) if media is None else [one or 0 for one in media]
        states_P = torch.tensor(
            [
                self._state_after(to_ints(row_L[:length]), start)
                for row_L, length, start in zip(token_ids_PL, to_ints(lengths_P), starts, strict=True)
            ]
        )
        copies = torch.tensor(list(copies_P))
        cache.states_B = torch.cat([cache.states_B, states_P.repeat_interleave(copies)])
        cache.lengths_B = torch.cat([cache.lengths_B, lengths_P.repeat_interleave(copies)])
        return self.log_SV[states_P].float()

    def step(self, cache: FakeCache, token_ids_B: Tensor) -> Tensor:
        self.calls.append(("step", (cache.num_rows,)))
        assert token_ids_B.shape == (cache.num_rows,), f"{token_ids_B.shape} tokens for {cache.num_rows} rows"
        assert bool(((token_ids_B >= 0) & (token_ids_B < self.vocab_size)).all()), f"unknown tokens: {token_ids_B}"
        cache.lengths_B = cache.lengths_B + 1
        assert int(cache.lengths_B.max()) <= cache.max_len, "a row longer than the cache"
        cache.states_B = (self.carry * cache.states_B + token_ids_B + 1) % self.log_SV.shape[0]
        return self.log_SV[cache.states_B].float()

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """Return None: there are no experts."""

    def refresh(self) -> None:
        self.num_refreshes += 1

    def logits_after(self, token_ids: Sequence[int], media: int = 0) -> Tensor:
        """Return the table's logits [V] after these tokens, for tests to compare with."""
        return self.log_SV[self._state_after(token_ids, media)].float()

    def _state_after(self, token_ids: Sequence[int], media: int = 0) -> int:
        state = media
        for token in token_ids:
            state = (self.carry * state + token + 1) % self.log_SV.shape[0]
        return state
