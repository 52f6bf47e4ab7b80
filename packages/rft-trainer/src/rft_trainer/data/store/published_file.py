"""One shard on disk: an Arrow file and the manifest with its hash, published by one rename, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rft_core.durable_files import replace_record, storage_errors, sync_directory
from rft_core.fault_points import fault_point

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Facts = TypeVar("Facts", bound=DataclassInstance)

MANIFEST = "manifest.json"
_BLOCK = 1 << 22


def shard_path(directory: Path, number: int) -> Path:
    """Return the place of a shard."""
    return directory / f"shard_{number:06d}"


def publish_shard(
    target: Path,
    name: str,
    make_batch: Callable[[], Any],
    facts_of: Callable[[str], Facts],
    *,
    task: str,
    written: str,
    beside: Mapping[str, bytes] | None = None,
) -> Facts:
    """Write a record batch and its manifest, and give them their place.

    Args:
        target: directory of the shard.
        name: of the Arrow file in it.
        make_batch: makes what is written.
        facts_of: makes the manifest from the file's SHA-256.
        task: what could not be done where the disk refuses.
        written: the fault point before the rename.
        beside: contents of further files of the shard by name, which the manifest has no hash of.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa

    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with storage_errors(task, target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        batch = make_batch()
        with pa.OSFile(str(temporary / name), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        _sync(temporary / name)
        for other, content in (beside or {}).items():
            (temporary / other).write_bytes(content)
            _sync(temporary / other)
        facts = facts_of(file_sha256(temporary / name))
        replace_record(temporary / MANIFEST, asdict(facts))
        fault_point(written)
        try:
            temporary.rename(target)
        except OSError as error:
            # a worker of a build that was killed may still have made it: the rows and the tokens are the same
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(temporary)
        sync_directory(target.parent)
    return facts


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def map_shard(path: Path, name: str) -> Any:
    """Return the record batch in the Arrow file of that name, mapped into memory."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.memory_map(str(path / name))) as reader:
        return reader.get_batch(0)


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, which is read block by block."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
