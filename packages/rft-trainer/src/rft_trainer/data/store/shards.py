"""Shards of tokenised samples: an Arrow file each, with a manifest of its size and hash beside it.

```
STORE/shard_000000/samples.arrow   source, index, prompt_length, weight, token_ids, loss_mask: one record a sample;
                                   of pairs numbers and prompt_key too, of prompts record and prompt_key
STORE/shard_000000/manifest.json   version, schema, SHA-256, and where reading goes on
```

A shard is published by one rename, whole or not at all, so that a build that was killed goes on behind what it had.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft_core.durable_files import replace_record, storage_errors, sync_directory
from rft_core.errors import StorageError
from rft_core.fault_points import declare, fault_point
from rft_trainer.data.store.token_columns import TokenColumns, joined

VERSION = 3
_SAMPLES, _MANIFEST = "samples.arrow", "manifest.json"
_BLOCK = 1 << 22
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
    directory: Path, number: int, blocks: Sequence[tuple[int, TokenColumns]], facts: Mapping[str, Any]
) -> ShardFacts:
    """Write (source, samples) of a shard and publish it; `facts` are those that the samples do not tell.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa

    target = shard_path(directory, number)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    samples = joined(columns for _, columns in blocks)
    with storage_errors("make a shard of the data store", target):
        temporary.mkdir(parents=True)
        schema = samples_schema(samples.numbers.shape[1], has_records=samples.has_records)
        batch = pa.record_batch(_arrays(blocks, samples), schema=schema)
        with pa.OSFile(str(temporary / _SAMPLES), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)
        with (temporary / _SAMPLES).open("rb+") as written:
            os.fsync(written.fileno())
        made = ShardFacts(
            version=VERSION,
            schema=_schema_text(samples.numbers.shape[1], has_records=samples.has_records),
            sha256=_digest(temporary / _SAMPLES),
            num_samples=len(samples.index),
            num_loss_tokens=samples.num_loss_tokens,
            num_numbers=samples.numbers.shape[1],
            has_records=samples.has_records,
            longest=int(samples.num_tokens.max(initial=0)),
            **facts,
        )
        replace_record(temporary / _MANIFEST, asdict(made))
        fault_point(_WRITTEN)
        _publish(temporary, target)
        sync_directory(directory)
    return made


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


def _publish(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        # a worker of a build that was killed may still have made it: the rows and the samples are the same
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)


def shard_path(directory: Path, number: int) -> Path:
    """Return the place of a shard."""
    return directory / f"shard_{number:06d}"


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
        facts = facts_of(json.loads((path / _MANIFEST).read_text(encoding="utf-8")))
        schema = _schema_text(facts.num_numbers, has_records=facts.has_records)
        if (facts.version, facts.schema) == (VERSION, schema) and facts.sha256 == _digest(path / _SAMPLES):
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
    import pyarrow as pa

    with pa.ipc.open_file(pa.memory_map(str(shard_path(directory, number) / _SAMPLES))) as reader:
        return reader.get_batch(0)


def _schema_text(num_numbers: int, *, has_records: bool) -> str:
    schema = samples_schema(num_numbers, has_records=has_records)
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
