"""Shards of token ids: an Arrow file each, mapped into memory, with a manifest of its size and hash beside it.

```
STREAM/shard_000000/tokens.arrow    one record: token_ids, document_starts, piece_ends, piece_bytes
STREAM/shard_000000/manifest.json   version, schema, SHA-256, numbers of tokens, documents and bytes
```

A shard is published by one rename, whole or not at all, so that a build that was killed goes on behind what it had.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.durable_files import replace_record, storage_errors, sync_directory
from rft_core.fault_points import declare, fault_point

VERSION = 1
_TOKENS, _MANIFEST = "tokens.arrow", "manifest.json"
_BLOCK = 1 << 22
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

    target = shard_path(directory, number)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    names = ShardTokens.__dataclass_fields__
    columns = [_one_row(getattr(tokens, name)) for name in names]
    with storage_errors("write tokens", target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        batch = pa.record_batch(columns, names=list(names))
        with pa.OSFile(str(temporary / _TOKENS), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        with (temporary / _TOKENS).open("rb+") as written:
            os.fsync(written.fileno())
        facts = TokenShardFacts(
            version=VERSION,
            schema=_schema_text(tokens.token_ids.dtype),
            sha256=_digest(temporary / _TOKENS),
            number=number,
            num_tokens=len(tokens.token_ids),
            num_documents=num_documents,
            num_bytes=int(tokens.piece_bytes[-1]) if len(tokens.piece_bytes) else 0,
            text_sha256=text_sha256,
        )
        replace_record(temporary / _MANIFEST, asdict(facts))
        fault_point(_WRITTEN)
        _publish(temporary, target)
        sync_directory(directory)
    return facts


def _one_row(values: Any) -> Any:
    import pyarrow as pa

    # large: a list of 32-bit offsets ends at 2^31 tokens
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), pa.array(values))


def _schema_text(dtype: Any) -> str:
    return f"token_ids: {np.dtype(dtype).name}, document_starts: int64, piece_ends: int64, piece_bytes: int64"


def _publish(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        # a worker of a build that was killed may still have made it: the text and the tokens are the same
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)


def shard_path(directory: Path, number: int) -> Path:
    """Return the place of a shard."""
    return directory / f"shard_{number:06d}"


def sound_shard(directory: Path, number: int, dtype: Any) -> TokenShardFacts | None:
    """Return the facts of a shard whose file is what its manifest says; None of one that is damaged or not there."""
    path = shard_path(directory, number)
    try:
        facts = token_facts_of(json.loads((path / _MANIFEST).read_text(encoding="utf-8")))
        expected = (VERSION, _schema_text(dtype), number)
        if (facts.version, facts.schema, facts.number) == expected and facts.sha256 == _digest(path / _TOKENS):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def token_facts_of(record: Mapping[str, Any]) -> TokenShardFacts:
    """Return the facts of a manifest as it was read."""
    return TokenShardFacts(**record)


def open_token_shard(directory: Path, number: int) -> ShardTokens:
    """Return the contents of a shard, mapped into memory."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.memory_map(str(shard_path(directory, number) / _TOKENS))) as reader:
        batch = reader.get_batch(0)
    return ShardTokens(*(batch.column(name).values.to_numpy() for name in ShardTokens.__dataclass_fields__))


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
