"""Shards of tokenised samples: an Arrow file each, with a manifest of its size and hash beside it.

```
STORE/shard_000000/samples.arrow   source, index, prompt_length, weight, token_ids, loss_mask: one record a sample
STORE/shard_000000/manifest.json   version, SHA-256, and where reading goes on
```

A shard is published by one rename, whole or not at all, so that a build that was killed goes on behind its last shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_record, storage_errors, sync_directory
from rft_core.errors import StorageError
from rft_core.fault_points import declare, fault_point
from rft_trainer.records.rollouts import TrainingSample

VERSION = 1
_SAMPLES, _MANIFEST = "samples.arrow", "manifest.json"
_BLOCK = 1 << 22
_WRITTEN = declare("store.shard_written", "a shard is on disk under its temporary name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """Contents of the manifest of a shard."""

    version: int
    sha256: str
    num_samples: int
    num_loss_tokens: int
    num_rows: int
    """Rows that were read for it, those that were left out too."""
    source: int
    file: int
    """Number of the source, and of the file in it, that reading goes on in."""
    line: int
    """Lines of that file that are read."""
    index: int
    """Rows of that source that are read."""
    too_long: tuple[tuple[str, int], ...]
    """(name, tokens) of rows that are left out for their length."""
    weightless: int
    """Rows of weight 0, which are left out too."""
    longest: int
    """Tokens of the longest sample."""


def samples_schema() -> Any:
    """Return the columns of a shard."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("source", pa.int32()),
            pa.field("index", pa.int64()),
            pa.field("prompt_length", pa.int32()),
            pa.field("weight", pa.float64()),
            pa.field("token_ids", pa.list_(pa.uint32())),
            pa.field("loss_mask", pa.list_(pa.bool_())),
        ]
    )


def write_shard(
    directory: Path, number: int, samples: Sequence[tuple[int, int, TrainingSample]], facts: Mapping[str, Any]
) -> ShardFacts:
    """Write (source, index, sample) of a shard and publish it; `facts` are those that the samples do not tell.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa

    target = shard_path(directory, number)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    columns = [
        [source for source, _, _ in samples],
        [index for _, index, _ in samples],
        [sample.prompt_length for _, _, sample in samples],
        [sample.weight for _, _, sample in samples],
        [sample.token_ids for _, _, sample in samples],
        [sample.loss_mask for _, _, sample in samples],
    ]
    with storage_errors("write a shard of the data store", target):
        temporary.mkdir(parents=True)
        schema = samples_schema()
        arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
        with pa.OSFile(str(temporary / _SAMPLES), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
        with (temporary / _SAMPLES).open("rb+") as written:
            os.fsync(written.fileno())
        lengths = [sample.num_tokens for _, _, sample in samples]
        made = ShardFacts(
            version=VERSION,
            sha256=_digest(temporary / _SAMPLES),
            num_samples=len(samples),
            num_loss_tokens=sum(sample.num_loss_tokens for _, _, sample in samples),
            longest=max(lengths, default=0),
            **facts,
        )
        replace_record(temporary / _MANIFEST, asdict(made))
        fault_point(_WRITTEN)
        temporary.rename(target)
        sync_directory(directory)
    return made


def shard_path(directory: Path, number: int) -> Path:
    """Return the place of a shard."""
    return directory / f"shard_{number:06d}"


def published_shards(directory: Path) -> list[ShardFacts]:
    """Return the facts of the shards that are there, in order and without a gap; what a kill left over is removed.

    Raises:
        StorageError: a shard is damaged.
    """
    for left in directory.glob(".shard_*"):
        shutil.rmtree(left, ignore_errors=True)
    facts: list[ShardFacts] = []
    while (path := shard_path(directory, len(facts))).is_dir():
        facts.append(_checked(path))
    return facts


def open_shard(directory: Path, number: int) -> Any:
    """Return the record batch of a shard, mapped into memory."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.memory_map(str(shard_path(directory, number) / _SAMPLES))) as reader:
        return reader.get_batch(0)


def _checked(path: Path) -> ShardFacts:
    try:
        record = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        record["too_long"] = tuple((str(name), int(length)) for name, length in record["too_long"])
        facts = ShardFacts(**record)
        if facts.version == VERSION and facts.sha256 == _digest(path / _SAMPLES):
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


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
