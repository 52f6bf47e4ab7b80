"""Building of a store: rows are divided into shards, and each is read, tokenised and written by itself.

One process or several build the same shards. Never more than one shard of samples a process is in memory. A build that
was stopped goes on with the shards that are missing. Several processes that want one store wait for the first of them.
"""

from __future__ import annotations

import fcntl
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from rft_core.durable_files import storage_errors
from rft_trainer.data.readers.arrow import iter_parquet
from rft_trainer.data.readers.files import no_rows
from rft_trainer.data.readers.json import iter_jsonl
from rft_trainer.data.readers.rows import Row, SkipLog
from rft_trainer.data.store.content_hash import keep_content_hash
from rft_trainer.data.store.shard_plan import Place, ShardPlan, Span, plan_shards
from rft_trainer.data.store.shards import ShardFacts, published_shards, shard_facts, write_shard
from rft_trainer.data.store.token_columns import TokenColumns

_COMPLETE = "complete"
LOCK = "lock"
"""File of every store; its time is that of the last start that opened it."""
ROWS_OF_SHARD = 16384
_ROWS_OF_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Samples of a block of rows of one source, and the rows that are left out."""

    samples: TokenColumns
    too_long: Sequence[tuple[str, int]]
    counts: Mapping[str, int]
    """Numbers of rows that are told to people, such as those of weight 0, which are left out too."""
    content: bytes | None = None
    """What the hash of the rows is of (`content_records`), in a store whose rows have that of rows in memory."""


Tokenize = Callable[[int, Sequence[Row], int], Tokenized]
"""(number of the source, rows, number of the first row in its source) -> their samples."""

BuildShards = Callable[[Iterator[ShardPlan]], Iterator[ShardFacts]]
"""Builds shards that are planned, and yields their facts in order."""


def build_store(
    directory: Path,
    sources: Sequence[Sequence[Path]],
    build: BuildShards,
    *,
    rows_of_shard: int = ROWS_OF_SHARD,
    hashes_rows: bool = False,
) -> list[ShardFacts]:
    """Build what is missing of a store, and return its shards.

    Args:
        directory: of the store, whose name follows from the files and from everything that its samples depend on.
        sources: the files of each source, in order.
        build: `in_this_process`, or the workers of `worker_pool`.
        rows_of_shard: rows that are read for a shard.
        hashes_rows: whether the hash of the rows is kept beside them, as `content_hash` reads it.

    Raises:
        KeyboardInterrupt: the process was asked to stop; the next build goes on with the missing shards.
        DataError: a row cannot be used, or there is none.
        StorageError: the store cannot be written, or is damaged.
    """
    with storage_errors("make the data store", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        shards = published_shards(directory)
        if not (directory / _COMPLETE).exists():
            last = shards[-1] if shards else None
            begin = Place(last.source, last.file, last.offset, last.line, last.index) if last else Place()
            shards += build(plan_shards(sources, begin, len(shards), rows_of_shard))
            if not shards:
                raise no_rows(sources[0][0])
            if hashes_rows:
                keep_content_hash(directory, len(shards))
            (directory / _COMPLETE).touch()
    return shards


def in_this_process(
    directory: Path,
    sources: Sequence[Sequence[Path]],
    tokenize: Tokenize,
    *,
    stopped: Callable[[], bool] = lambda: False,
    rows_of_block: int = _ROWS_OF_BLOCK,
) -> BuildShards:
    """Return what builds one shard after the other here.

    Args:
        directory: of the store.
        sources: the files of each source.
        tokenize: makes samples of rows.
        stopped: asked after every block: whether the process was asked to stop.
        rows_of_block: rows that are tokenised at a time.
    """

    def build(plans: Iterator[ShardPlan]) -> Iterator[ShardFacts]:
        for plan in plans:
            yield build_shard(directory, sources, plan, tokenize, stopped=stopped, rows_of_block=rows_of_block)

    return build


def build_shard(
    directory: Path,
    sources: Sequence[Sequence[Path]],
    plan: ShardPlan,
    tokenize: Tokenize,
    *,
    stopped: Callable[[], bool] = lambda: False,
    rows_of_block: int = _ROWS_OF_BLOCK,
) -> ShardFacts:
    """Build one shard, unless it is there, and return its facts.

    Raises:
        KeyboardInterrupt: as `build_store` does. DataError, StorageError: too.
    """
    if (found := shard_facts(directory, plan.number)) is not None:
        return found
    blocks: list[tuple[int, TokenColumns]] = []
    too_long: list[tuple[str, int]] = []
    counts: Counter[str] = Counter()
    content: list[bytes | None] = []
    for span in plan.spans:
        source, index = span.begin.source, span.begin.index
        reading = _rows(sources[source][span.begin.file], span)
        while rows := list(islice(reading, rows_of_block)):
            # nothing of the run has begun that could be saved
            if stopped():
                raise KeyboardInterrupt
            made = tokenize(source, rows, index)
            blocks.append((source, made.samples))
            too_long += made.too_long
            counts.update(made.counts)
            content.append(made.content)
            index += len(rows)
    facts = {"num_rows": plan.num_rows, **asdict(plan.end), "too_long": tuple(too_long), "counts": dict(counts)}
    known = [part for part in content if part is not None]
    return write_shard(directory, plan.number, blocks, facts, b"".join(known) if len(known) == len(content) else None)


def first_row(files: Sequence[Path]) -> Row:
    """Return the first row of a source, whose columns are those of the source.

    Raises:
        DataError: it cannot be read, or no file has a row.
    """
    for file in files:
        for row in _rows(file, Span(Place(), 1)):
            return row
    raise no_rows(files[0])


def row_at(files: Sequence[Path], number: int) -> Row:
    """Return the row of a source with this number, counted over its files from 0; all before it are read."""
    for file in files:
        for row in _rows(file, Span(Place(), sys.maxsize)):
            if not number:
                return row
            number -= 1
    raise IndexError(number)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Let one process build at a time; the lock of one that was killed is free."""
    with (directory / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rows(file: Path, span: Span) -> Iterator[Row]:
    begin = span.begin
    if file.suffix.lower() == ".parquet":
        rows = iter_parquet(file, after_line=begin.line)
    else:
        rows = iter_jsonl(file, SkipLog(), after_line=begin.line, offset=begin.offset)
    return islice(rows, span.num_rows)
