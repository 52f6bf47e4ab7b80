"""Hash of the rows of a store: that of the bytes of its shards in order, also where a build was stopped behind it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rft_trainer.data.store.content_hash import CONTENT, keep_content_hash, kept_content_hash
from rft_trainer.data.store.published_file import shard_path


def test_the_hash_is_of_all_shards_in_order_and_its_bytes_are_removed(tmp_path: Path) -> None:
    parts = [b"one", b"", b"three"]
    for number, part in enumerate(parts):
        shard_path(tmp_path, number).mkdir()
        (shard_path(tmp_path, number) / CONTENT).write_bytes(part)
    keep_content_hash(tmp_path, len(parts))
    expected = hashlib.sha256(b"onethree").hexdigest()
    assert kept_content_hash(tmp_path) == expected
    assert list(tmp_path.rglob(CONTENT)) == []
    # stopped before the store was complete, with one file still there
    (shard_path(tmp_path, 2) / CONTENT).write_bytes(b"three")
    keep_content_hash(tmp_path, len(parts))
    assert kept_content_hash(tmp_path) == expected
    assert list(tmp_path.rglob(CONTENT)) == []
