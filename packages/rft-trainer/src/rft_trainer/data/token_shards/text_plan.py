"""Division of texts into shards: a function of the files alone, whoever builds the shards.

A stream is the documents of some files, one after the other. A shard of it is known by where its text begins and ends,
so that it is built without reading what stands before.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rft_trainer.data.readers.arrow import count_parquet
from rft_trainer.data.readers.files import BYTE_ORDER_MARK, open_data_file

BYTES_OF_SHARD = 16 << 20
_BLOCK = 1 << 22
_LOOKED = 1 << 16
_SPACES = frozenset(b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0")
_FIRST_BYTES_OF_SPACES = frozenset(b"\xc2\xe1\xe2\xe3")
"""UTF-8 of the spaces above ASCII begins with these."""


@dataclass(frozen=True, slots=True)
class TextRange:
    """A part of a file: bytes of a .txt or .jsonl file, records of any other."""

    file: int
    """Number of the file in its stream."""
    begin: int
    end: int
    first_line: int = 1
    """Line at which it begins, of a .jsonl file."""

    @property
    def is_empty(self) -> bool:
        """True where nothing is in it."""
        return self.end <= self.begin


@dataclass(frozen=True, slots=True)
class TextShardPlan:
    """Text of a shard of a stream."""

    number: int
    ranges: tuple[TextRange, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in the files of a source at which the training text ends and the held-out text begins."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class TextStream:
    """Documents of files, from one place to another."""

    files: tuple[Path, ...]
    separator: str = ""
    """Ends a document within a .txt file; empty = a file is one document."""
    text_key: str = "text"
    begin: Cut | None = None
    """None = at the begin of the first file."""
    end: Cut | None = None
    """None = at the end of the last file."""

    def plans(self, bytes_of_shard: int = BYTES_OF_SHARD) -> Iterator[TextShardPlan]:
        """Yield the shards of the stream, each of about so many bytes.

        Raises:
            DataError: a file cannot be read.
        """
        ranges: list[TextRange] = []
        number, room = 0, bytes_of_shard
        for part in self._parts():
            for piece, size in self._pieces(part, bytes_of_shard):
                # many small files share a shard, and a large one begins none of its own
                if ranges and size > room:
                    yield TextShardPlan(number, tuple(ranges))
                    ranges, number, room = [], number + 1, bytes_of_shard
                ranges.append(piece)
                room -= size
        if ranges:
            yield TextShardPlan(number, tuple(ranges))

    def _parts(self) -> Iterator[TextRange]:
        """Yield the part of every file that belongs to the stream."""
        first, last = (self.begin.file if self.begin else 0), (self.end.file if self.end else len(self.files) - 1)
        for number in range(first, last + 1):
            begin = self.begin.offset if self.begin and number == first else 0
            end = self.end.offset if self.end and number == last else size_of(self.files[number])
            part = TextRange(number, begin, end)
            if not part.is_empty:
                yield part

    def _pieces(self, part: TextRange, bytes_of_shard: int) -> Iterator[tuple[TextRange, int]]:
        """Yield the pieces of a part of a file, none much larger than a shard, with their bytes."""
        file = self.files[part.file]
        if kind_of_file(file) == "records":
            yield from _record_pieces(file, part, bytes_of_shard)
            return
        with open_data_file(file) as stream, closing(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)) as text:
            is_rows = kind_of_file(file) == "lines"
            line = 1 + _count_lines(text, 0, part.begin) if is_rows else 1
            begin = part.begin
            while begin < part.end:
                aim = begin + bytes_of_shard
                end = part.end if aim >= part.end else min(self._cut_behind(text, aim, is_rows=is_rows), part.end)
                yield TextRange(part.file, begin, end, line), end - begin
                line += _count_lines(text, begin, end) if is_rows else 0
                begin = end

    def _cut_behind(self, text: mmap.mmap, offset: int, *, is_rows: bool) -> int:
        if is_rows:
            return line_end(text, offset)
        if self.separator:
            mark = self.separator.encode()
            # one that began before the place counts too
            found = text.find(mark, max(offset - len(mark) + 1, 0))
            return len(text) if found < 0 else found + len(mark)
        return text_cut(text, offset)


def kind_of_file(file: Path) -> str:
    """Return "text" of a .txt file, "lines" of rows that are a line each, "records" of any other."""
    return {".txt": "text", ".jsonl": "lines"}.get(file.suffix.lower(), "records")


def size_of(file: Path) -> int:
    """Return the end of a whole file: its bytes or its records, as `TextRange` counts them.

    Raises:
        DataError: it cannot be read.
    """
    if kind_of_file(file) != "records":
        with open_data_file(file) as stream:
            return stream.seek(0, 2)
    return num_records(file)


def num_records(file: Path) -> int:
    """Return the number of records of a parquet file; of others they are all read.

    Raises:
        DataError: it cannot be read.
    """
    if file.suffix.lower() == ".parquet":
        return count_parquet(file)
    from rft_trainer.data.readers.formats import read_rows

    return len(read_rows(file))


def line_end(text: mmap.mmap, offset: int) -> int:
    """Return the first place at or behind `offset` that is behind the end of a line."""
    found = text.find(b"\n", max(offset - 1, 0))
    return len(text) if found < 0 else found + 1


def text_cut(text: mmap.mmap, offset: int) -> int:
    """Return a place near behind `offset` where cutting a text changes no token of a usual tokenizer.

    That is behind a line end which no space follows, else before a single space; a text without either is cut between
    two characters.
    """
    looked = bytes(text[offset - 1 : offset + _LOOKED])
    for mark, first in ((b"\n", 0), (b" ", 1)):
        found = looked.find(mark, first)
        while 0 <= found < len(looked) - 1:
            if mark == b"\n" and _is_word(looked[found + 1]):
                return offset + found
            if mark == b" " and _is_word(looked[found + 1]) and looked[found - 1] not in _SPACES:
                return offset - 1 + found
            found = looked.find(mark, found + 1)
    if offset + _LOOKED >= len(text):
        # a rest this short needs no shard of its own
        return len(text)
    place = offset
    # bytes that continue a character of UTF-8
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place


def _is_word(byte: int) -> bool:
    return byte not in _SPACES and byte not in _FIRST_BYTES_OF_SPACES


def _count_lines(text: mmap.mmap, begin: int, end: int) -> int:
    return sum(text[place : min(place + _BLOCK, end)].count(b"\n") for place in range(begin, end, _BLOCK))


def _record_pieces(file: Path, part: TextRange, bytes_of_shard: int) -> Iterator[tuple[TextRange, int]]:
    """Yield pieces of about so many bytes, by the mean size of a record."""
    if file.suffix.lower() != ".parquet":
        # read whole in any case
        yield part, bytes_of_shard
        return
    import pyarrow.parquet as pq

    facts = pq.read_metadata(file)
    mean = max(sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups)), 1) / facts.num_rows
    step = max(1, int(bytes_of_shard / mean))
    for begin in range(part.begin, part.end, step):
        end = min(begin + step, part.end)
        yield TextRange(part.file, begin, end), int((end - begin) * mean)


def held_out_cut(files: Sequence[Path], share: float) -> Cut:
    """Return where the last `share` of the files begins: by characters of .txt files, by rows of others.

    The file in which the place lies is found by the bytes of the files.

    Raises:
        DataError: a file cannot be read.
    """
    if all(kind_of_file(file) == "text" for file in files):
        return _character_cut(files, share)
    sizes = [_bytes_of(file) for file in files]
    place = sum(sizes) * (1.0 - share)
    for number, size in enumerate(sizes):
        if place <= size or number == len(files) - 1:
            return Cut(number, _row_cut(files[number], min(place / max(size, 1), 1.0)))
        place -= size
    raise AssertionError("a list of files is not empty")


def _character_cut(files: Sequence[Path], share: float) -> Cut:
    counts = [_num_characters(file) for file in files]
    wanted = int(sum(counts) * (1.0 - share))
    for number, count in enumerate(counts):
        if wanted < count or number == len(files) - 1:
            return Cut(number, _offset_of_character(files[number], wanted))
        wanted -= count
    raise AssertionError("a list of files is not empty")


def _row_cut(file: Path, share: float) -> int:
    if kind_of_file(file) == "lines":
        with open_data_file(file) as stream, closing(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)) as text:
            return line_end(text, int(len(text) * share))
    return int(num_records(file) * share)


def _bytes_of(file: Path) -> int:
    if file.is_dir():
        return sum(part.stat().st_size for part in file.rglob("*") if part.is_file())
    return file.stat().st_size


def _num_characters(file: Path) -> int:
    return sum(count for _, count in _character_blocks(file))


def _character_blocks(file: Path) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of a file with the characters that begin in each; a byte order mark is none."""
    import numpy as np

    with open_data_file(file) as stream:
        is_first = True
        while block := stream.read(_BLOCK):
            marks = 1 if is_first and block.startswith(BYTE_ORDER_MARK) else 0
            is_first = False
            yield block, int(((np.frombuffer(block, np.uint8) & 0xC0) != 0x80).sum()) - marks


def _offset_of_character(file: Path, wanted: int) -> int:
    """Return the byte at which the character of this number begins."""
    import numpy as np

    offset = 0
    for block, count in _character_blocks(file):
        if wanted < count:
            starts = np.flatnonzero((np.frombuffer(block, np.uint8) & 0xC0) != 0x80)
            return offset + int(starts[wanted + (len(starts) - count)])
        wanted -= count
        offset += len(block)
    return offset
