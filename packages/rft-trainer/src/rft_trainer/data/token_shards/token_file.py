"""Shards of token ids: an Arrow file each, mapped into memory, with a manifest of its size and hash beside it.

```
STREAM/shard_000000/tokens.arrow    one record: token_ids, document_starts, piece_ends, piece_bytes
STREAM/shard_000000/manifest.json   version, schema, SHA-256, numbers of tokens, documents and bytes
```

A shard is published by one rename, whole or not at all, so that a build that was killed goes on behind what it had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.fault_points import declare
from rft_trainer.data.store.published_file import MANIFEST, file_sha256, map_shard, publish_shard, shard_path

VERSION = 1
_TOKENS = "tokens.arrow"
_WRITTEN = declare("token_shards.shard_written", "a shard of tokens is on disk under its temporary name")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShardFacts:
    """Contents of the manifest of a shard."""

    version: int
    schema: str
    """Columns and their types."""
    sha256: str
    number: int
    num_tokens: int
    num_documents: int
    """Documents that begin in it."""
    num_bytes: int
    """Of its text as UTF-8."""
    text_sha256: str
    """Of its text, document after document."""


@dataclass(frozen=True, slots=True)
class ShardTokens:
    """Contents of a shard: T tokens of P pieces of texts."""

    token_ids: Any
    """[T] uint16 or uint32."""
    document_starts: Any
    """[D] int64: places of the end tokens with which a document begins that has another one before it."""
    piece_ends: Any
    """[P] int64: tokens up to the end of each piece."""
    piece_bytes: Any
    """[P] int64: bytes of text up to the end of each piece."""


def token_type(vocab_size: int) -> Any:
    """Return the smallest type that holds every id of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def write_token_shard(
    directory: Path, number: int, tokens: ShardTokens, *, num_documents: int, text_sha256: str
) -> TokenShardFacts:
    """Write the tokens of a shard and publish it.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa

    def make_batch() -> Any:
        names = ShardTokens.__dataclass_fields__
        return pa.record_batch([_one_row(getattr(tokens, name)) for name in names], names=list(names))

    def facts_of(sha256: str) -> TokenShardFacts:
        return TokenShardFacts(
            version=VERSION,
            schema=_schema_text(tokens.token_ids.dtype),
            sha256=sha256,
            number=number,
            num_tokens=len(tokens.token_ids),
            num_documents=num_documents,
            num_bytes=int(tokens.piece_bytes[-1]) if len(tokens.piece_bytes) else 0,
            text_sha256=text_sha256,
        )

    target = shard_path(directory, number)
    return publish_shard(target, _TOKENS, make_batch, facts_of, task="write tokens", written=_WRITTEN)


def _one_row(values: Any) -> Any:
    import pyarrow as pa

    # large: a list of 32-bit offsets ends at 2^31 tokens
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), pa.array(values))


def _schema_text(dtype: Any) -> str:
    return f"token_ids: {np.dtype(dtype).name}, document_starts: int64, piece_ends: int64, piece_bytes: int64"


def sound_shard(directory: Path, number: int, dtype: Any) -> TokenShardFacts | None:
    """Return the facts of a shard whose file is what its manifest says; None of one that is damaged or not there."""
    path = shard_path(directory, number)
    try:
        facts = token_facts_of(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        expected = (VERSION, _schema_text(dtype), number)
        if (facts.version, facts.schema, facts.number) == expected and facts.sha256 == file_sha256(path / _TOKENS):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def token_facts_of(record: Mapping[str, Any]) -> TokenShardFacts:
    """Return the facts of a manifest as it was read."""
    return TokenShardFacts(**record)


def open_token_shard(directory: Path, number: int) -> ShardTokens:
    """Return the contents of a shard, mapped into memory."""
    batch = map_shard(shard_path(directory, number), _TOKENS)
    return ShardTokens(*(batch.column(name).values.to_numpy() for name in ShardTokens.__dataclass_fields__))
