"""Samples of a block of rows as columns: one array a column, and no Python object a token behind the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rft_trainer.records.rollouts import TrainingSample


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """N samples with T tokens in all, M of which have an entry in a loss mask."""

    index: Any
    """[N] int64: number of the row in its source."""
    prompt_length: Any
    """[N] int32."""
    weight: Any
    """[N] float64."""
    num_tokens: Any
    """[N] int32: tokens of prompt and response."""
    token_ids: Any
    """[T] uint32, sample after sample."""
    num_masked: Any
    """[N] int32: entries of the loss mask, 0 where every response token is learned."""
    loss_mask: Any
    """[M] bool."""
    numbers: Any
    """[N, K] float64: numbers of a sample that its loss reads, such as the label of a pair; K is 0 without any."""
    prompt_key: Any
    """[N] uint64: hash of the prompt where it is found by that, else 0; not stored without numbers or records."""
    num_record: Any
    """[N] int64: bytes of the record of each sample, what a stage reads beside tokens; [0] without records."""
    record_bytes: Any
    """[R] uint8: the records, one after the other."""

    @property
    def has_records(self) -> bool:
        """Whether every sample has a record."""
        return len(self.num_record) > 0

    @property
    def num_loss_tokens(self) -> int:
        """Tokens in the loss; the first token of a sequence cannot be predicted."""
        unmasked = self.num_masked == 0
        plain = (self.num_tokens - np.maximum(self.prompt_length, 1))[unmasked].sum()
        ends = np.cumsum(self.num_masked)
        # without a prompt the first entry of a mask is the first token
        unpredicted = self.loss_mask[(ends - self.num_masked)[~unmasked & (self.prompt_length == 0)]]
        return int(plain) + int(self.loss_mask.sum()) - int(unpredicted.sum())


def token_columns(samples: Sequence[tuple[int, TrainingSample]]) -> TokenColumns:
    """Return the columns of (number of the row in its source, sample)."""
    return columns_of(
        [index for index, _ in samples],
        [sample.prompt_length for _, sample in samples],
        [sample.weight for _, sample in samples],
        [sample.token_ids for _, sample in samples],
        [sample.loss_mask for _, sample in samples],
    )


def columns_of(
    index: Sequence[int],
    prompt_length: Sequence[int],
    weight: Sequence[float],
    token_ids: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[bool]],
    numbers: Any = None,
    prompt_key: Any = None,
    records: Sequence[bytes] = (),
) -> TokenColumns:
    """Return the columns of samples that are given as one list a column, all of the same length.

    `numbers` is an array [N, K], and `prompt_key` one of [N]; None = samples without such numbers. `records` are N, or
    none.
    """
    num_tokens = np.fromiter(map(len, token_ids), np.int32, len(token_ids))
    num_masked = np.fromiter(map(len, loss_mask), np.int32, len(loss_mask))
    return TokenColumns(
        np.asarray(index, np.int64),
        np.asarray(prompt_length, np.int32),
        np.asarray(weight, np.float64),
        num_tokens,
        np.fromiter(chain.from_iterable(token_ids), np.uint32, int(num_tokens.sum())),
        num_masked,
        np.fromiter(chain.from_iterable(loss_mask), np.bool_, int(num_masked.sum())),
        np.zeros((len(num_tokens), 0)) if numbers is None else np.asarray(numbers, np.float64),
        np.zeros(len(num_tokens), np.uint64) if prompt_key is None else np.asarray(prompt_key, np.uint64),
        np.fromiter(map(len, records), np.int64, len(records)),
        np.frombuffer(b"".join(records), np.uint8),
    )


def joined(blocks: Iterable[TokenColumns]) -> TokenColumns:
    """Return the samples of all blocks, block after block."""
    parts = list(blocks) or [columns_of([], [], [], [], [])]
    names = TokenColumns.__dataclass_fields__
    return TokenColumns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
