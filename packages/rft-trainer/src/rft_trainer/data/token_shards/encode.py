"""Tokens of the text of a shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rft_core.errors import DataError
from rft_trainer.data.token_shards.pieces import TextPiece, pieces_of
from rft_trainer.data.token_shards.text_plan import TextShardPlan, TextStream
from rft_trainer.data.token_shards.token_file import (
    ShardTokens,
    TokenShardFacts,
    sound_shard,
    token_type,
    write_token_shard,
)

_CHARACTERS_OF_BLOCK = 1 << 22


class TokenEncoder(Protocol):
    """A tokenizer of plain texts."""

    @property
    def where(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def digest(self) -> str:
        """SHA-256 of all that its tokens follow from."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


def build_token_shard(
    directory: Path,
    stream: TextStream,
    plan: TextShardPlan,
    tokenizer: TokenEncoder,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> TokenShardFacts:
    """Build one shard, unless it is there, and return its facts.

    Raises:
        KeyboardInterrupt: the process was asked to stop. DataError: a text cannot be read or encoded.
        StorageError: it cannot be written.
    """
    if (found := sound_shard(directory, plan.number, token_type(tokenizer.vocab_size))) is not None:
        return found
    making = _Making(tokenizer, is_first=plan.number == 0)
    for block in _blocks(pieces_of(stream, plan)):
        # nothing of the run has begun that could be saved
        if stopped():
            raise KeyboardInterrupt
        making.add(block)
    return write_token_shard(
        directory,
        plan.number,
        making.tokens(),
        num_documents=making.num_documents,
        text_sha256=making.text_hash.hexdigest(),
    )


def _blocks(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    block: list[TextPiece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text)
        if size >= _CHARACTERS_OF_BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Making:
    """A shard that is being made."""

    def __init__(self, tokenizer: TokenEncoder, *, is_first: bool) -> None:
        self._tokenizer, self._is_first = tokenizer, is_first
        self._type = token_type(tokenizer.vocab_size)
        self._ids: list[Any] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._bytes: list[int] = []
        self._num_tokens = self._num_bytes = 0
        self.num_documents = 0
        self.text_hash = hashlib.sha256()

    def add(self, block: Sequence[TextPiece]) -> None:
        """Add the tokens of pieces, with the end token between two documents."""
        for piece, ids in zip(block, self._encoded(block), strict=True):
            raw = piece.text.encode()
            self.text_hash.update(raw)
            if piece.begins_document:
                self._begin_document(piece)
            self._append(np.asarray(ids, self._type))
            self._num_bytes += len(raw)
            self._ends.append(self._num_tokens)
            self._bytes.append(self._num_bytes)

    def _begin_document(self, piece: TextPiece) -> None:
        self.num_documents += 1
        # the stream itself begins without one: nothing ends there
        if not (self._is_first and self._num_tokens == 0):
            self._starts.append(self._num_tokens)
            self._append(np.asarray([end_token(self._tokenizer, piece.where)], self._type))

    def _append(self, ids: Any) -> None:
        self._ids.append(ids)
        self._num_tokens += len(ids)

    def _encoded(self, block: Sequence[TextPiece]) -> list[list[int]]:
        texts = [piece.text for piece in block]
        try:
            # the first text of a batch goes another way, which is slow for a long one
            return self._tokenizer.encode_batch(["", *texts])[1:]
        except DataError as error:
            for piece in block:
                try:
                    self._tokenizer.encode(piece.text)
                except DataError as one:
                    raise DataError(**{**asdict(one.problem), "where": piece.where}) from error
            raise

    def tokens(self) -> ShardTokens:
        """Return what was added."""
        ids = np.concatenate(self._ids) if self._ids else np.zeros(0, self._type)
        return ShardTokens(ids, *(np.asarray(column, np.int64) for column in (self._starts, self._ends, self._bytes)))


def end_token(tokenizer: TokenEncoder, where: str) -> int:
    """Return the token that stands between two documents.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eos_ids:
        return tokenizer.eos_ids[0]
    raise DataError(
        code="data.no_end_token",
        what=f"{tokenizer.where} has no end token, and {where} begins a second document",
        where=where,
        why="documents are separated by the end token, which the model learns to end a text with",
        do="give the tokenizer an eos_token, as rft-train tokenizer does",
    )
