"""Shards on disk: published whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.errors import StorageError
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.shards import VERSION, open_shard, published_shards, write_shard
from rft_trainer.data.store.token_columns import token_columns
from rft_trainer.records.rollouts import TrainingSample

PLACE = {
    "num_rows": 3,
    "source": 0,
    "file": 1,
    "offset": 70,
    "line": 3,
    "index": 9,
    "too_long": (("a:2", 77),),
    "counts": {"weightless": 1},
}
SAMPLE = TrainingSample("a:0", (5, 6, 7), 1, 0.0)


def test_a_shard_says_what_is_in_it(tmp_path: Path) -> None:
    written = write_shard(tmp_path, 0, [(0, token_columns([(0, SAMPLE)]))], PLACE)
    assert published_shards(tmp_path) == [written]
    assert (written.num_samples, written.num_loss_tokens, written.longest, written.version) == (1, 2, 3, VERSION)
    assert (written.too_long, written.file, written.line) == ((("a:2", 77),), 1, 3)
    assert open_shard(tmp_path, 0).num_rows == 1
    assert published_shards(tmp_path / "nowhere") == []


def test_a_shard_of_another_version_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [(0, token_columns([(0, SAMPLE)]))], PLACE)
    manifest = shard_path(tmp_path, 0) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": VERSION + 1}))
    with pytest.raises(StorageError):
        published_shards(tmp_path)


def test_a_shard_may_hold_no_sample(tmp_path: Path) -> None:
    written = write_shard(tmp_path, 0, [], PLACE)
    assert (written.num_samples, written.longest, open_shard(tmp_path, 0).num_rows) == (0, 0, 0)
