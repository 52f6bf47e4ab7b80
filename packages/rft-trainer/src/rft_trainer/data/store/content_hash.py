"""Hash of the rows of a store, that which the same rows have in memory, so that a run goes on with either.

SHA-256 goes over the rows in order, and shards are built side by side: each brings the bytes of its rows in a file, and
the files go when the hash of all is known.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rft_core.durable_files import replace_record
from rft_trainer.data.store.published_file import shard_path

CONTENT = "rows.content"
"""File of a shard with the bytes of its rows, until all shards are there."""
_HASH = "content_hash.json"


def keep_content_hash(directory: Path, num_shards: int) -> None:
    """Keep the hash of all rows in a store whose shards are all built, and remove what it was made of."""
    files = [shard_path(directory, number) / CONTENT for number in range(num_shards)]
    # a build that was stopped behind the hash has removed some of the files
    if not (directory / _HASH).exists():
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.read_bytes())
        replace_record(directory / _HASH, {"sha256": digest.hexdigest()})
    for file in files:
        file.unlink(missing_ok=True)


def kept_content_hash(directory: Path) -> str:
    """Return the hash that `keep_content_hash` kept."""
    return str(json.loads((directory / _HASH).read_text(encoding="utf-8"))["sha256"])
