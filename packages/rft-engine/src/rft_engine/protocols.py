"""Interfaces that the in-process engine needs from a model and its cache.

`rft_models` implements both; a deterministic double is in `rft_engine.testing.table_model`. Shape letters:
P prompts of one prefill, L tokens of the longest of them, B rows of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
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
            media: images of each prompt as the model's own tokenizer made them, None where it has none; None: no
                prompt has any.

        Returns:
            [P, V] float32 logits after each prompt's last token.
        """
        ...

    def step(self, cache: CacheT, token_ids_B: Tensor) -> Tensor:
        """Append one token to every row, in row order; [B] int64 in, [B, V] float32 logits out."""
        ...

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """The experts that the tokens of whole sequences go to, by a forward of its own.

        Returns:
            [layers, tokens, choices] int64, the tokens of all sequences in order, the choices ascending; None where
            there are no experts, or none that are known.
        """
        ...

    def refresh(self) -> None:
        """Derive again whatever is computed from the parameters, after the parameters changed."""
        ...


class WeightCopy(DecodableModel[CacheT], Protocol):
    """A decodable model whose tensors are written from outside (`rft_models.decode.weight_copy.GenerationCopy`)."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the copy's floating-point tensors."""
        ...

    def begin(self) -> None:
        """Take memory where there is none; from now on every tensor is waited for."""
        ...

    def write(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Copy one full tensor; return its name in this model and the tensor that holds it now."""
        ...

    def finish(self) -> None:
        """Refuse if a tensor did not come; derive what is computed from them."""
        ...

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the model computes with, under the names of `write`."""
        ...

    def own_name(self, name: str) -> str:
        """The name under which `named_tensors` has this tensor of the policy."""
        ...

    def drop(self) -> None:
        """Give the memory of the tensors back; `begin` takes it again."""
        ...


Pick = Callable[[Tensor, int], Tensor]
"""([B, V] float32 logits, how many tokens the rows have so far) -> [B] int64 the next ones."""


class WholeGenerator(Protocol):
    """A model that generates whole rows and calls back for each token."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model can place; 0 = no limit."""
        ...

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        pick: Pick,
        ended: Callable[[], Tensor],
        media: Sequence[Any] | None = None,
    ) -> None:
        """Continue every row until [B] bool `ended()`, called after each token, or for `max_new_tokens`.

        `media` are the images of each row, None where it has none.

        Rows that ended may be asked for as long as others have not.
        """
        ...


class ServedModel(Protocol):
    """The policy of this process, as the engines that share its process may use it."""

    def decoder(self, *, graphs: bool) -> DecodableModel[Any]:
        """Return the decode forward on the parameters being trained; `graphs`: a step may be a CUDA graph."""
        ...

    def weight_copy(self, *, graphs: bool) -> WeightCopy[Any] | None:
        """Return a copy to generate with; None where the parameters themselves can be read: whole, and in its dtype."""
        ...

    def generator(self) -> WholeGenerator:
        """Return the model's own loop of whole rows on the parameters being trained."""
        ...
