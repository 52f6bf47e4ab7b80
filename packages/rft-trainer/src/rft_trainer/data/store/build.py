"""Building of a store: rows are read one after another, tokenised in blocks, and written shard by shard.

Never more than one shard of samples is in memory. A build that was stopped goes on behind its last published shard.
Several processes that want one store wait for the first of them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.durable_files import storage_errors
from rft_trainer.data.readers.arrow import iter_parquet
from rft_trainer.data.readers.files import no_rows
from rft_trainer.data.readers.json import iter_jsonl
from rft_trainer.data.readers.rows import Row, SkipLog
from rft_trainer.data.store.shards import ShardFacts, published_shards, write_shard
from rft_trainer.records.rollouts import TrainingSample

SUFFIXES = (".jsonl", ".parquet")
"""Files that are read row by row."""
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Samples of a block of rows of one source, and the rows that are left out."""

    samples: Sequence[tuple[int, TrainingSample]]
    """(number of the row in its source, sample)."""
    too_long: Sequence[tuple[str, int]]
    weightless: int


Tokenize = Callable[[int, Sequence[Row], int], Tokenized]
"""(number of the source, rows, number of the first row in its source) -> their samples."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place at which reading goes on: source, file in it, lines of the file and rows of the source that are read."""

    source: int = 0
    file: int = 0
    line: int = 0
    index: int = 0


def build_store(
    directory: Path,
    sources: Sequence[Sequence[Path]],
    tokenize: Tokenize,
    *,
    rows_of_shard: int = 16384,
    rows_of_block: int = 512,
    stopped: Callable[[], bool] = lambda: False,
) -> list[ShardFacts]:
    """Build what is missing of a store, and return its shards.

    Args:
        directory: of the store, whose name follows from the files and from everything that `tokenize` depends on.
        sources: the files of each source, in order.
        tokenize: makes samples of rows.
        rows_of_shard: rows that are read for a shard.
        rows_of_block: rows that are tokenised at a time.
        stopped: asked after every block: whether the process was asked to stop.

    Raises:
        KeyboardInterrupt: it was; the next build goes on behind the last shard.
        DataError: a row cannot be used, or there is none.
        StorageError: the store cannot be written, or is damaged.
    """
    with storage_errors("make the data store", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        shards = published_shards(directory)
        if not (directory / _COMPLETE).exists():
            blocks = _blocks(sources, _behind(shards), rows_of_block)
            shards += _missing(directory, len(shards), _until(stopped, blocks), tokenize, rows_of_shard, sources[0][0])
            (directory / _COMPLETE).touch()
    return shards


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Let one process build at a time; the lock of one that was killed is free."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _behind(shards: Sequence[ShardFacts]) -> _Place:
    last = shards[-1] if shards else None
    return _Place() if last is None else _Place(last.source, last.file, last.line, last.index)


_Block = tuple[int, int, list[Row], _Place]
"""Source, number of the first row in it, rows, and the place behind them."""


def _blocks(sources: Sequence[Sequence[Path]], place: _Place, size: int) -> Iterator[_Block]:
    """Yield the blocks of rows behind a place."""
    for source in range(place.source, len(sources)):
        index = place.index if source == place.source else 0
        first_file = place.file if source == place.source else 0
        for file in range(first_file, len(sources[source])):
            after = place.line if (source, file) == (place.source, place.file) else 0
            for rows in _grouped(_rows(sources[source][file], after), size):
                yield source, index, rows, _Place(source, file, rows[-1].line, index + len(rows))
                index += len(rows)


def _until(stopped: Callable[[], bool], blocks: Iterator[_Block]) -> Iterator[_Block]:
    """Yield blocks until the process is asked to stop: nothing of the run has begun that could be saved."""
    for block in blocks:
        if stopped():
            raise KeyboardInterrupt
        yield block


def _rows(file: Path, after_line: int) -> Iterator[Row]:
    if file.suffix.lower() == ".parquet":
        return iter_parquet(file, after_line=after_line)
    return iter_jsonl(file, SkipLog(), after_line=after_line)


def _grouped(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    block: list[Row] = []
    for row in rows:
        block.append(row)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


class _Shard:
    """A shard that is being filled."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, TrainingSample]] = []
        self.too_long: list[tuple[str, int]] = []
        self.weightless, self.num_rows = 0, 0
        self.place = _Place()

    def add(self, source: int, rows: Sequence[Row], made: Tokenized, place: _Place) -> None:
        self.samples += [(source, index, sample) for index, sample in made.samples]
        self.too_long += made.too_long
        self.weightless += made.weightless
        self.num_rows += len(rows)
        self.place = place

    def facts(self) -> dict[str, Any]:
        place = self.place
        return {
            "num_rows": self.num_rows,
            "source": place.source,
            "file": place.file,
            "line": place.line,
            "index": place.index,
            "too_long": tuple(self.too_long),
            "weightless": self.weightless,
        }


def _missing(
    directory: Path,
    number: int,
    blocks: Iterator[_Block],
    tokenize: Tokenize,
    rows_of_shard: int,
    file: Path,
) -> list[ShardFacts]:
    written: list[ShardFacts] = []
    shard = _Shard()
    for source, first, rows, place in blocks:
        shard.add(source, rows, tokenize(source, rows, first), place)
        if shard.num_rows >= rows_of_shard:
            written.append(write_shard(directory, number + len(written), shard.samples, shard.facts()))
            shard = _Shard()
    if shard.num_rows:
        written.append(write_shard(directory, number + len(written), shard.samples, shard.facts()))
    if not number and not written:
        raise no_rows(file)
    return written
