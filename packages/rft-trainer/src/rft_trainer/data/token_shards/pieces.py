"""Texts of a shard, in pieces that a tokenizer takes: read, decoded and cut here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import DataError
from rft_trainer.data.readers.arrow import iter_parquet
from rft_trainer.data.readers.files import BYTE_ORDER_MARK, decode_text, open_data_file
from rft_trainer.data.readers.formats import read_rows
from rft_trainer.data.readers.json import iter_jsonl
from rft_trainer.data.readers.rows import Row, SkipLog
from rft_trainer.data.token_shards.text_plan import TextRange, TextShardPlan, TextStream, kind_of_file

CHARACTERS_OF_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a document."""

    text: str
    begins_document: bool
    where: str
    """File and line of its row, or file alone."""


def pieces_of(stream: TextStream, plan: TextShardPlan, most: int = CHARACTERS_OF_PIECE) -> Iterator[TextPiece]:
    """Yield the text of a shard in pieces of at most `most` characters; documents without a character are left out.

    Raises:
        DataError: a file cannot be read, or a row has no text.
    """
    for part in plan.ranges:
        documents = _documents(stream, part)
        for text, begins, where in documents:
            for number, piece in enumerate(cut_text(text, most)):
                yield TextPiece(piece, begins and number == 0, where)


def _documents(stream: TextStream, part: TextRange) -> Iterator[tuple[str, bool, str]]:
    """Yield (text, whether a document begins with it, its place)."""
    file = stream.files[part.file]
    if kind_of_file(file) != "text":
        for row in _rows(file, part):
            text = _text_of(row, stream.text_key)
            if text:
                yield text, True, row.where(stream.text_key)
        return
    text = _text_between(file, part)
    if not stream.separator:
        yield text, part.begin == 0, str(file)
        return
    for number, document in enumerate(text.split(stream.separator)):
        if document:
            # what stands before the part ends with the separator, unless the part was cut out of a document
            yield document, number > 0 or _is_behind(file, part.begin, stream.separator), str(file)


def _text_between(file: Path, part: TextRange) -> str:
    with open_data_file(file) as opened:
        opened.seek(part.begin)
        raw = opened.read(part.end - part.begin)
    head = len(BYTE_ORDER_MARK) if part.begin == 0 and raw.startswith(BYTE_ORDER_MARK) else 0
    try:
        return decode_text(raw[head:], file, offset=part.begin + head)
    except DataError:
        # counted only now: the line is that of the file, and most texts are read without an error
        decode_text(raw[head:], file, offset=part.begin + head, first_line=1 + _lines_before(file, part.begin))
        raise


def _lines_before(file: Path, offset: int) -> int:
    with open_data_file(file) as opened:
        return opened.read(offset).count(b"\n")


def _is_behind(file: Path, offset: int, separator: str) -> bool:
    mark = separator.encode()
    if offset == 0:
        return True
    with open_data_file(file) as opened:
        opened.seek(max(offset - len(mark), 0))
        return opened.read(len(mark)) == mark


def _rows(file: Path, part: TextRange) -> Iterator[Row]:
    if kind_of_file(file) == "lines":
        # told by bytes: a part that ends in the middle of a line does not occur
        yield from _rows_of_lines(file, part)
        return
    rows = iter_parquet(file, after_line=part.begin) if file.suffix.lower() == ".parquet" else iter(read_rows(file))
    for row in rows:
        if row.line > part.end:
            return
        if row.line > part.begin:
            yield row


def _rows_of_lines(file: Path, part: TextRange) -> Iterator[Row]:
    with open_data_file(file) as opened:
        opened.seek(part.begin)
        num_lines = opened.read(part.end - part.begin).count(b"\n")
    last = part.first_line + num_lines
    for row in iter_jsonl(file, SkipLog(), after_line=part.first_line - 1, offset=part.begin):
        # a last line without an end is one more than the ends that were counted
        if row.line > last or (row.line == last and _ends_line(file, part.end)):
            return
        yield row


def _ends_line(file: Path, offset: int) -> bool:
    with open_data_file(file) as opened:
        opened.seek(max(offset - 1, 0))
        return opened.read(1) == b"\n"


def _text_of(row: Row, key: str) -> str:
    value = row.fields.get(key)
    if isinstance(value, str):
        return value
    what = f"column {key!r} holds {type(value).__name__}, not text" if key in row.fields else f"no column {key!r}"
    texts = [name for name, cell in row.fields.items() if isinstance(cell, str)]
    raise DataError(
        code="data.no_text",
        what=f"{what}; the row has {', '.join(row.fields) or 'no column'}",
        where=row.where(key),
        why="a document to train on is the text of one column",
        do=f"--text_key {texts[0]}" if texts else "--text_key COLUMN, one that holds text",
    )


def cut_text(text: str, most: int) -> Iterator[str]:
    """Yield a text in pieces of at most `most` characters, cut where it changes no token of a usual tokenizer.

    That is behind a line end which no space follows, else before a single space, else anywhere.
    """
    begin = 0
    while len(text) - begin > most:
        end = _place_before(text, begin, begin + most)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def _place_before(text: str, begin: int, limit: int) -> int:
    place = text.rfind("\n", begin, limit)
    while place > begin:
        if not text[place + 1].isspace():
            return place + 1
        place = text.rfind("\n", begin, place)
    place = text.rfind(" ", begin + 1, limit)
    while place > begin:
        if not text[place + 1].isspace() and not text[place - 1].isspace():
            return place
        place = text.rfind(" ", begin + 1, place)
    return limit
