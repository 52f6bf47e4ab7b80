"""Interfaces that the in-process engine needs from a model and its cache.

`rft_models` implements both; a deterministic double is in `rft_engine.testing.table_model`. Shape letters:
P prompts of one prefill, L tokens of the longest of them, B rows of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor


class PromptMedia(Protocol):
    """The images of a prompt, for an engine with an image processor of its own."""

    @property
    def image_token_id(self) -> int:
        """Token id of the placeholders of images."""
        ...

    @property
    def files(self) -> Sequence[bytes]:
        """Image files, in the order of their placeholders."""
        ...

    @property
    def processor_options(self) -> Mapping[str, Any]:
        """Options of the image processor beside its own configuration."""
        ...

    def collapsed(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt with one placeholder an image."""
        ...


class DecodeCache(Protocol):
    """Keys and values of the sequences that are being decoded: one row a sequence."""

    @property
    def num_rows(self) -> int:
        """Rows in use; rows are numbered from 0 in the order in which they were appended."""
        ...

    @property
    def max_rows(self) -> int:
        """Number of rows that fit."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these and close the gaps.

        Args:
            rows: [K] int64, ascending, on the model's device; K may be 0.
        """
        ...

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` is now; a row may be taken several times, or not at all.

        Args:
            rows: [K] int64, at most `max_rows` of them; rows of a prompt stay neighbours, and prompts in their order.
        """
        ...


CacheT = TypeVar("CacheT", bound=DecodeCache)


class DecodableModel(Protocol[CacheT]):
    """A causal model that can be asked one token at a time; `CacheT` is its own kind of cache."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model can place; 0 = no limit."""
        ...

    def new_cache(self, max_rows: int, max_len: int) -> CacheT:
        """An empty cache for `max_rows` sequences of at most `max_len` tokens each."""
        ...

    def prefill(
        self,
        cache: CacheT,
        token_ids_PL: Tensor,
        lengths_P: Tensor,
        copies_P: Sequence[int],
        media: Sequence[Any] | None = None,
    ) -> Tensor:
        """Read whole prompts; append `copies_P[p]` rows for prompt p, prompt after prompt.

        Args:
            cache: where the rows go; `sum(copies_P)` of them must be free.
            token_ids_PL: [P, L] int64, padded on the right with any valid id.
            lengths_P: [P] int64, tokens of each prompt without padding, at least 1.
            copies_P: sequences to be continued from each prompt, at least 1.
            media: images of each prompt as the model's own codec made them, None where it has none; None: no
                prompt has any.

        Returns:
            [P, V] float32 logits after each prompt's last token.
        """
        ...

    def step(self, cache: CacheT, token_ids_B: Tensor) -> Tensor:
        """Append one token to every row, in row order; [B] int64 in, [B, V] float32 logits out."""
        ...

    def refresh(self) -> None:
        """Derive again whatever is computed from the parameters, after the parameters changed."""
        ...
