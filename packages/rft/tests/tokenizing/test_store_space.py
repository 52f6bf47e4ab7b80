"""Disk space of data stores: a build is refused above a bound, by the folder, its size and what is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rft.tokenizing import store_space
from rft.tokenizing.store_space import within
from rft_core.errors import StorageError
from rft_trainer.data.store.build import Tokenized, build_store, in_this_process
from rft_trainer.data.store.shards import ShardFacts, published_shards
from rft_trainer.data.store.token_columns import columns_of


def tokenize(source: int, rows: Any, first: int) -> Tokenized:
    del source
    num = len(rows)
    samples = columns_of([*range(first, first + num)], [1] * num, [1.0] * num, [[1]] * num, [()] * num)
    return Tokenized(samples, [], {})


def built(root: Path, name: str, most: int) -> list[ShardFacts]:
    (root.parent / "rows.jsonl").write_text("".join(json.dumps({"a": n}) + "\n" for n in range(6)))
    files, directory = [[root.parent / "rows.jsonl"]], root / name
    build = within(root, directory, most, in_this_process(directory, files, tokenize))
    return build_store(directory, files, build, rows_of_shard=2)


def test_a_build_ends_where_all_stores_take_more_and_goes_on_when_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_space, "GIGABYTE", 1000)
    root = tmp_path / "stores"
    whole = built(root, "old", 10**6)
    size = sum(file.stat().st_size for file in (root / "old").rglob("*") if file.is_file())
    built(root, "new", 10**6)
    for name, when in (("old", 86400), ("new", 2 * 86400)):
        os.utime(root / name / "lock", (when, when))
    # two stores and a shard of a third fit, and not two shards of it
    most = (2 * size + size // 2) // 1000
    with pytest.raises(StorageError) as caught:
        built(root, "third", most)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("store.space", f"rm -r {root}/old")
    assert f"data_store_max_gb is {most}" in problem.what
    assert str(root) in problem.what
    assert f"old {size / 1000:.1f} GB, last used 1970-01-02; new {size / 1000:.1f} GB" in problem.why
    assert len(published_shards(root / "third")) == 2
    # what is there may be read, however much it is
    assert built(root, "new", 1) == whole
    for file in [*(root / "old").rglob("*.*"), root / "old" / "lock"]:
        file.unlink()
    assert built(root, "third", most) == whole


def test_a_store_that_is_too_large_by_itself_is_answered_with_a_larger_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_space, "GIGABYTE", 1000)
    with pytest.raises(StorageError) as caught:
        built(tmp_path / "stores", "only", 1)
    assert caught.value.problem.do.startswith("--data_store_max_gb ")
    assert built(tmp_path / "stores", "only", int(caught.value.problem.do.split()[1]))
