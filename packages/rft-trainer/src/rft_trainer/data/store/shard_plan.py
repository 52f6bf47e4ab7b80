"""Division of the rows of files into shards: a function of the files alone, whoever builds the shards.

A shard is known by where its rows begin in bytes and lines, so that it is built without reading what stands before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rft_trainer.data.readers.arrow import count_parquet
from rft_trainer.data.readers.files import open_data_file
from rft_trainer.data.readers.json import blank_line, read_line

SUFFIXES = (".jsonl", ".parquet")
"""Files that are read row by row."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place at which reading goes on: source, file in it, bytes and lines of the file and rows of the source read."""

    source: int = 0
    file: int = 0
    offset: int = 0
    line: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a shard that stand one after the other in a file."""

    begin: Place
    num_rows: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Rows of a shard, and the place behind them."""

    number: int
    spans: tuple[Span, ...]
    end: Place

    @property
    def num_rows(self) -> int:
        """Rows that are read for the shard."""
        return sum(span.num_rows for span in self.spans)


def plan_shards(sources: Sequence[Sequence[Path]], begin: Place, first: int, rows_of_shard: int) -> Iterator[ShardPlan]:
    """Yield the shards behind a place, the first of which has the number `first`; reads lines, and decodes none.

    Raises:
        DataError: a file cannot be read, or has a line of 64 MiB.
    """
    spans: list[Span] = []
    number, room, end = first, rows_of_shard, begin
    for source in range(begin.source, len(sources)):
        index = begin.index if source == begin.source else 0
        first_file = begin.file if source == begin.source else 0
        for file in range(first_file, len(sources[source])):
            place = begin if (source, file) == (begin.source, begin.file) else Place(source, file, index=index)
            cuts = _Cuts(sources[source][file], place)
            while (taken := cuts.take(room)).num_rows:
                spans.append(taken)
                room, end = room - taken.num_rows, cuts.place
                if not room:
                    yield ShardPlan(number, tuple(spans), end)
                    spans, number, room = [], number + 1, rows_of_shard
            index = cuts.place.index
    if spans:
        yield ShardPlan(number, tuple(spans), end)


class _Cuts:
    """A file that is cut into spans, each as long as is asked for or as the rest of the file."""

    def __init__(self, file: Path, place: Place) -> None:
        self.place = place
        self._rows = _records(file, place) if file.suffix.lower() == ".parquet" else _lines(file, place)

    def take(self, num_rows: int) -> Span:
        """Return the next rows, at most `num_rows`; none at the end of the file."""
        begin = self.place
        taken = deque(enumerate(islice(self._rows, num_rows), start=1), maxlen=1)
        if not taken:
            return Span(begin, 0)
        count, (offset, line) = taken[0]
        self.place = replace(begin, offset=offset, line=line, index=begin.index + count)
        return Span(begin, count)


def _lines(file: Path, place: Place) -> Iterator[tuple[int, int]]:
    """Yield the bytes and lines up to the end of each row; blank lines are no rows."""
    offset, line = place.offset, place.line
    with open_data_file(file) as stream:
        stream.seek(offset)
        while raw := read_line(stream, file, line + 1):
            offset, line = offset + len(raw), line + 1
            if not blank_line(raw, line):
                yield offset, line


def _records(file: Path, place: Place) -> Iterator[tuple[int, int]]:
    return ((0, record) for record in range(place.line + 1, count_parquet(file) + 1))
