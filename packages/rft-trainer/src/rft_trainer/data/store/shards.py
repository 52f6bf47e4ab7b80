"""Shards of tokenised samples: an Arrow file each, with a manifest of its size and hash beside it.

```
STORE/shard_000000/samples.arrow   source, index, prompt_length, weight, token_ids, loss_mask: one record a sample;
                                   of pairs numbers and prompt_key too, of prompts record and prompt_key
STORE/shard_000000/manifest.json   version, schema, SHA-256, and where reading goes on
```

A shard is published by one rename, whole or not at all, so that a build that was killed goes on behind what it had.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.errors import StorageError
from rft_core.fault_points import declare
from rft_trainer.data.store.content_hash import CONTENT
from rft_trainer.data.store.published_file import MANIFEST, file_sha256, map_shard, publish_shard, shard_path
from rft_trainer.data.store.token_columns import TokenColumns, joined

VERSION = 3
_SAMPLES = "samples.arrow"
_WRITTEN = declare("store.shard_written", "a shard is on disk under its temporary name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """Contents of the manifest of a shard."""

    version: int
    schema: str
    """Columns and their types."""
    sha256: str
    num_samples: int
    num_loss_tokens: int
    num_numbers: int
    """Numbers that every sample has for its loss."""
    has_records: bool = False
    """Whether every sample has a record of what is read beside its tokens."""
    num_rows: int
    """Rows that were read for it, those that were left out too."""
    source: int
    file: int
    """Number of the source, and of the file in it, that reading goes on in."""
    offset: int
    line: int
    """Bytes and lines of that file that are read."""
    index: int
    """Rows of that source that are read."""
    too_long: tuple[tuple[str, int], ...]
    """(name, tokens) of rows that are left out for their length."""
    counts: Mapping[str, int]
    """Numbers of rows that are told to people, such as those of weight 0, which are left out too."""
    longest: int
    """Tokens of the longest sample."""


def samples_schema(num_numbers: int, *, has_records: bool = False) -> Any:
    """Return the columns of a shard whose samples have so many numbers for their loss, and records or none."""
    import pyarrow as pa

    fields = [
        pa.field("source", pa.int32()),
        pa.field("index", pa.int64()),
        pa.field("prompt_length", pa.int32()),
        pa.field("weight", pa.float64()),
        pa.field("token_ids", pa.list_(pa.uint32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
    ]
    if num_numbers:
        fields += [pa.field("numbers", pa.list_(pa.float64(), num_numbers)), pa.field("prompt_key", pa.uint64())]
    if has_records:
        fields += [pa.field("record", pa.large_binary()), pa.field("prompt_key", pa.uint64())]
    return pa.schema(fields)


def write_shard(
    directory: Path,
    number: int,
    blocks: Sequence[tuple[int, TokenColumns]],
    facts: Mapping[str, Any],
    content: bytes | None = None,
) -> ShardFacts:
    """Write (source, samples) of a shard and publish it; `facts` are those that the samples do not tell.

    `content` is what the hash of the rows is of; None where the store has none.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa

    samples = joined(columns for _, columns in blocks)
    num_numbers, has_records = samples.numbers.shape[1], samples.has_records

    def make_batch() -> Any:
        return pa.record_batch(_arrays(blocks, samples), schema=samples_schema(num_numbers, has_records=has_records))

    def made(sha256: str) -> ShardFacts:
        return ShardFacts(
            version=VERSION,
            schema=_schema_text(num_numbers, has_records=has_records),
            sha256=sha256,
            num_samples=len(samples.index),
            num_loss_tokens=samples.num_loss_tokens,
            num_numbers=num_numbers,
            has_records=has_records,
            longest=int(samples.num_tokens.max(initial=0)),
            **facts,
        )

    task = "make a shard of the data store"
    target, beside = shard_path(directory, number), {} if content is None else {CONTENT: content}
    return publish_shard(target, _SAMPLES, make_batch, made, task=task, written=_WRITTEN, beside=beside)


def _arrays(blocks: Sequence[tuple[int, TokenColumns]], samples: TokenColumns) -> list[Any]:
    import pyarrow as pa

    sizes = [len(columns.index) for _, columns in blocks]
    sources = np.repeat(np.array([source for source, _ in blocks], np.int32), sizes)
    num_numbers = samples.numbers.shape[1]
    assert not (num_numbers and samples.has_records), "pairs have numbers, prompts have records"
    beside: list[Any] = []
    if num_numbers:
        numbers = pa.FixedSizeListArray.from_arrays(_array(samples.numbers.ravel(), pa.float64()), num_numbers)
        beside = [numbers, _array(samples.prompt_key, pa.uint64())]
    if samples.has_records:
        beside = [_records(samples), _array(samples.prompt_key, pa.uint64())]
    masks = pa.Array.from_buffers(
        pa.bool_(), len(samples.loss_mask), [None, pa.py_buffer(np.packbits(samples.loss_mask, bitorder="little"))]
    )
    return [
        _array(sources, pa.int32()),
        _array(samples.index, pa.int64()),
        _array(samples.prompt_length, pa.int32()),
        _array(samples.weight, pa.float64()),
        pa.ListArray.from_arrays(_offsets(samples.num_tokens), _array(samples.token_ids, pa.uint32())),
        pa.ListArray.from_arrays(_offsets(samples.num_masked), masks),
        *beside,
    ]


def _array(values: Any, kind: Any) -> Any:
    """Return a numpy array as one of Arrow; `pa.array` loads pandas, which takes a second."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _records(samples: TokenColumns) -> Any:
    import pyarrow as pa

    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.num_record)])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(samples.record_bytes)]
    return pa.Array.from_buffers(pa.large_binary(), len(samples.num_record), buffers)


def _offsets(lengths: Any) -> Any:
    import pyarrow as pa

    return _array(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]), pa.int32())


def published_shards(directory: Path) -> list[ShardFacts]:
    """Return the facts of the shards that are there, in order up to the first gap; what a kill left over is removed.

    Raises:
        StorageError: a shard is damaged.
    """
    for left in directory.glob(".shard_*"):
        shutil.rmtree(left, ignore_errors=True)
    facts: list[ShardFacts] = []
    while (found := shard_facts(directory, len(facts))) is not None:
        facts.append(found)
    return facts


def shard_facts(directory: Path, number: int) -> ShardFacts | None:
    """Return the facts of a shard, whose hash is compared; None where it is not published.

    Raises:
        StorageError: it is damaged.
    """
    path = shard_path(directory, number)
    if not path.is_dir():
        return None
    try:
        facts = facts_of(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        schema = _schema_text(facts.num_numbers, has_records=facts.has_records)
        if (facts.version, facts.schema) == (VERSION, schema) and facts.sha256 == file_sha256(path / _SAMPLES):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise StorageError(
        code="store.damaged",
        what=f"{path} is not what its manifest says",
        where=str(path),
        why="tokens of a damaged shard would be trained on without a word",
        do=f"rm -r {path.parent}, and start again: it is built anew",
    )


def facts_of(record: Mapping[str, Any]) -> ShardFacts:
    """Return the facts of a manifest as it was read."""
    too_long = tuple((str(name), int(length)) for name, length in record["too_long"])
    return ShardFacts(**{**record, "too_long": too_long})


def open_shard(directory: Path, number: int) -> Any:
    """Return the record batch of a shard, mapped into memory."""
    return map_shard(shard_path(directory, number), _SAMPLES)


def _schema_text(num_numbers: int, *, has_records: bool) -> str:
    schema = samples_schema(num_numbers, has_records=has_records)
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
