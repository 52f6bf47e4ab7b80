"""Building of a store: what goes into it, kills, other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_core.errors import DataError, StorageError
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.store import build as module
from rft_trainer.data.store.build import Tokenized, build_store, in_this_process
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.data.store.shards import ShardFacts
from rft_trainer.data.store.token_columns import token_columns
from rft_trainer.records.rollouts import TrainingSample

LONGEST = 6


class Tokenize:
    """One token a character; rows of weight 0 and of more than six characters are left out."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.rows: list[int] = []
        self._fails_at = fails_at

    def __call__(self, source: int, rows: Sequence[Row], first: int) -> Tokenized:
        samples, too_long = [], []
        for index, row in enumerate(rows, start=first):
            if self._fails_at == row.fields["n"]:
                raise KeyboardInterrupt
            self.rows.append(row.fields["n"])
            text = str(row.fields["text"])
            name = f"s{source}:{index}"
            if len(text) > LONGEST:
                too_long.append((name, len(text)))
            elif text:
                samples.append((index, TrainingSample(name, tuple(map(ord, text)), 1, 0.0, weight=1.0 + source)))
        return Tokenized(token_columns(samples), too_long, {"weightless": len(rows) - len(samples) - len(too_long)})


def jsonl(path: Path, first: int, count: int) -> Path:
    rows = [{"n": n, "text": f"t{n}"} for n in range(first, first + count)]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")  # blank lines are no rows
    return path


@pytest.fixture
def sources(tmp_path: Path) -> list[list[Path]]:
    """Two sources: two files of five and four rows, and a parquet file of three."""
    table = pa.table({"n": [9, 10, 11], "text": ["t9", "", "too long"]})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    return [[jsonl(tmp_path / "a.jsonl", 0, 5), jsonl(tmp_path / "b.jsonl", 5, 4)], [tmp_path / "c.parquet"]]


def built(directory: Path, sources: list[list[Path]], tokenize: Tokenize, **options: Any) -> list[ShardFacts]:
    """Shards of four rows, tokenised two at a time."""
    here = in_this_process(directory, sources, tokenize, rows_of_block=2, **options)
    return build_store(directory, sources, here, rows_of_shard=4)


def build(directory: Path, sources: list[list[Path]], tokenize: Tokenize) -> StoredSamples:
    shards = built(directory, sources, tokenize)
    return StoredSamples(directory, shards, ["s0", "s1"])


def test_every_row_is_read_once_and_numbered_in_its_source(tmp_path: Path, sources: list[list[Path]]) -> None:
    tokenize = Tokenize()
    shards = built(tmp_path / "store", sources, tokenize)
    samples = StoredSamples(tmp_path / "store", shards, ["s0", "s1"])
    assert tokenize.rows == list(range(12))
    assert [sample.sample_id for sample in samples] == [*(f"s0:{n}" for n in range(9)), "s1:0"]
    assert "".join(map(chr, samples[8].token_ids)) == "t8"
    assert (samples[9].weight, samples.sizes(2)) == (2.0, (9, 1))
    assert [row for facts in shards for row in facts.too_long] == [("s1:2", 8)]
    assert sum(facts.num_rows for facts in shards) == 12
    assert sum(facts.counts["weightless"] for facts in shards) == 1
    assert sum(facts.num_loss_tokens for facts in shards) == sum(sample.num_loss_tokens for sample in samples)
    build(tmp_path / "store", sources, again := Tokenize())
    assert again.rows == [], "what is complete is opened"


@pytest.mark.parametrize("stopped_at", [0, 3, 4, 6, 10, 11])
def test_a_build_that_was_stopped_goes_on_behind_its_last_shard(
    tmp_path: Path, sources: list[list[Path]], stopped_at: int
) -> None:
    whole = build(tmp_path / "whole", sources, Tokenize())
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "store", sources, Tokenize(fails_at=stopped_at))
    found = build(tmp_path / "store", sources, rest := Tokenize())
    assert list(found) == list(whole)
    assert rest.rows[0] > stopped_at - 8
    assert rest.rows == list(range(rest.rows[0], 12))


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path, sources: list[list[Path]]) -> None:
    left = tmp_path / "store" / ".shard_000001.77"
    left.mkdir(parents=True)
    (left / "samples.arrow").write_bytes(b"half")
    build(tmp_path / "store", sources, Tokenize())
    assert not left.exists()


@pytest.mark.parametrize("name", ["samples.arrow", "manifest.json"])
def test_a_damaged_shard_is_refused_with_what_to_remove(tmp_path: Path, sources: list[list[Path]], name: str) -> None:
    build(tmp_path / "store", sources, Tokenize())
    file = shard_path(tmp_path / "store", 1) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StorageError) as caught:
        build(tmp_path / "store", sources, Tokenize())
    assert caught.value.problem.where == str(file.parent)
    assert f"rm -r {tmp_path / 'store'}" in caught.value.problem.do


def test_a_row_that_cannot_be_read_is_named_and_what_is_built_stays(tmp_path: Path, sources: list[list[Path]]) -> None:
    with sources[0][1].open("a") as file:
        file.write("{")
    with pytest.raises(DataError) as caught:
        build(tmp_path / "store", sources, Tokenize())
    assert caught.value.problem.where.startswith(f"{sources[0][1]}:8")
    assert shard_path(tmp_path / "store", 1).is_dir()


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="0 rows"):
        build(tmp_path / "store", [[tmp_path / "a.jsonl"]], Tokenize())


def test_one_process_builds_at_a_time(
    tmp_path: Path, sources: list[list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(module.fcntl, "flock", lambda _, kind: held.append(kind))
    build(tmp_path / "store", sources, Tokenize())
    assert held == [module.fcntl.LOCK_EX]


def test_a_build_ends_when_the_process_is_asked_to_stop(tmp_path: Path, sources: list[list[Path]]) -> None:
    answers = iter([False, False, False, True])
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "store", sources, Tokenize(), stopped=lambda: next(answers))
    assert shard_path(tmp_path / "store", 0).is_dir()
    assert len(build(tmp_path / "store", sources, rest := Tokenize())) == 10
    assert rest.rows[0] == 4
