"""Rows of JSON Lines and of JSON files, read strictly.

Strictly means: no duplicate keys, no NaN or infinity, no number that overflows, no unpaired
surrogate, objects only. What would be accepted here and fail in the middle of a run is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rft_core.errors import DataError
from rft_trainer.data.readers.files import BYTE_ORDER_MARK, cut_off, decode_text, no_rows, open_data_file
from rft_trainer.data.readers.rows import Row, SkipLog, refused_value, shown

MAX_LINE_BYTES = 64 * 1024 * 1024
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _RefusedValue(ValueError):
    """A value that is legal for Python's parser and not for ours."""

    def __init__(self, what: str, why: str, key: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.key = what, why, key


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _twice(key)
        seen.add(key)
    raise AssertionError("unequal lengths without a duplicate")


def _twice(key: str) -> _RefusedValue:
    return _RefusedValue(f"key {shown(key)} occurs twice", "which of the two values counts is undefined", key)


def _refuse_constant(name: str) -> float:
    raise _RefusedValue(f"{name} is not a JSON number", "a value must be finite; write null where there is none")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RefusedValue(f"{shown(digits)} overflows a 64-bit float", "a number must be finite")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)
_SCAN: Callable[[str, int], tuple[Any, int]] = vars(_DECODER)["scan_once"]
"""The decoder without the search for blanks around a value, which takes as long as a short row."""


def read_jsonl(file: Path, skips: SkipLog) -> list[Row]:
    """Read one JSON object a line; blank lines are skipped, a byte order mark and CRLF are accepted."""
    rows = list(iter_jsonl(file, skips))
    if not rows:
        raise no_rows(file)
    return rows


def iter_jsonl(file: Path, skips: SkipLog, *, after_line: int = 0, offset: int = 0) -> Iterator[Row]:
    """Read as `read_jsonl` does, row by row, behind the first `after_line` lines, which take `offset` bytes."""
    line, name = after_line, str(file)
    with open_data_file(file) as stream:
        stream.seek(offset)
        while raw := read_line(stream, file, line + 1):
            line += 1
            body = raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw
            try:
                fields = _line_fields(body, file, line, offset + len(raw) - len(body))
                if fields is not None:
                    yield Row(fields, name, line)
            except DataError as error:
                skips.take(error)
            # also of a row that was skipped: positions in messages are those of the file
            offset += len(raw)


def read_line(stream: BinaryIO, file: Path, line: int) -> bytes:
    """Read the line of this number with its end; empty at the end of the file.

    Raises:
        DataError: it is longer than any row.
    """
    # one byte more than allowed, so that a file without line ends is refused before it is all in memory
    raw = stream.readline(MAX_LINE_BYTES + 1)
    if len(raw) > MAX_LINE_BYTES:
        raise _too_long(file, line)
    return raw


def blank_line(raw: bytes, line: int) -> bool:
    """Return whether a line, given with its number, holds no row."""
    return not (raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw).strip(b" \t\r\n")


def _line_fields(raw: bytes, file: Path, line: int, offset: int) -> dict[str, Any] | None:
    # without the line end, behind which an error would be told of the next line
    text = decode_text(raw, file, first_line=line, offset=offset).rstrip("\r\n")
    stripped = text.strip(" \t\r\n")
    if not stripped:
        return None
    try:
        value = _decoded(text, stripped)
    except (ValueError, RecursionError) as error:
        raise _bad_value(error, file, line, text, cut=not raw.endswith(b"\n")) from error
    _refuse_surrogates(value, stripped, file, line)
    return _as_fields(value, file, line)


def _decoded(text: str, stripped: str) -> Any:
    """Return the value of a line, whose blanks at both ends are left out in `stripped`."""
    try:
        value, end = _SCAN(stripped, 0)
        if end == len(stripped):
            return value
    except (StopIteration, ValueError, RecursionError):
        pass
    # what is wrong is told with its column in the line
    return _DECODER.decode(text)


def read_json(file: Path, skips: SkipLog) -> list[Row]:
    """Read a list of objects, or an object whose key "data" holds such a list (its other keys are not rows)."""
    with open_data_file(file) as stream:
        raw = stream.read()
    text = decode_text(raw.removeprefix(BYTE_ORDER_MARK), file)
    try:
        rows = _Document(text, file).rows()
    except (ValueError, RecursionError) as error:
        raise _bad_value(error, file, 1, text, cut=False) from error
    good: list[Row] = []
    for value, line in rows:
        try:
            good.append(Row(_as_fields(value, file, line), str(file), line))
        except DataError as error:
            skips.take(error)
    if not good:
        raise no_rows(file)
    return good


class _Document:
    """Parser of the outermost list of a JSON text that keeps the line on which each element starts."""

    def __init__(self, text: str, file: Path) -> None:
        self._text, self._file = text, file
        self._position, self._line, self._counted = 0, 1, 0

    def rows(self) -> list[tuple[Any, int]]:
        self._skip_space()
        rows = self._list() if self._peek() == "[" else self._data_of_object()
        if self._position < len(self._text):
            raise self._extra()
        return rows

    def _list(self) -> list[tuple[Any, int]]:
        rows: list[tuple[Any, int]] = []
        self._expect("[")
        if self._peek() == "]":
            self._expect("]")
            return rows
        while True:
            line = self._current_line()
            start = self._position
            value = self._value()
            _refuse_surrogates(value, self._text[start : self._position], self._file, line)
            rows.append((value, line))
            if self._either(",", "]") == "]":
                return rows

    def _data_of_object(self) -> list[tuple[Any, int]]:
        rows: list[tuple[Any, int]] | None = None
        keys: dict[str, None] = {}
        self._expect("{")
        while self._peek() != "}" or keys:
            key = self._key(keys)
            keys[key] = None
            self._expect(":")
            if key == "data" and self._peek() == "[":
                rows = self._list()
            else:
                self._value()
            if self._either(",", "}") == "}":
                break
        if rows is None:
            if self._peek() == "{":
                raise self._extra()
            raise _RefusedValue(
                f'no list under the key "data"; the object has {len(keys)} keys: {shown(list(keys))}',
                'a JSON data file is a list of objects or {"data": [objects]}',
                "data",
            )
        return rows

    def _key(self, others: Container[str]) -> str:
        if self._peek() != '"':
            raise json.JSONDecodeError("Expecting a key in double quotes", self._text, self._position)
        line = self._current_line()
        key = self._value()
        if key in others:
            error = _twice(key)
            error.add_note(str(line))
            raise error
        return key

    def _value(self) -> Any:
        try:
            value, self._position = _DECODER.raw_decode(self._text, self._position)
        except _RefusedValue as error:
            # the line goes along as a note, since the decoder's hooks know no positions
            error.add_note(str(self._current_line()))
            raise
        self._skip_space()
        return value

    def _expect(self, symbol: str) -> None:
        self._either(symbol, symbol)

    def _either(self, first: str, second: str) -> str:
        symbol = self._peek()
        if symbol not in (first, second) or not symbol:
            raise json.JSONDecodeError(f"Expecting {first!r} or {second!r}", self._text, self._position)
        self._position += 1
        self._skip_space()
        return symbol

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end()

    def _current_line(self) -> int:
        # from the last count on: counting from the start for every row would take quadratic time
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def _extra(self) -> ValueError:
        if self._peek() == "{":
            return json.JSONDecodeError("Extra data: more than one value, as in JSON Lines", self._text, self._position)
        return json.JSONDecodeError("Extra data", self._text, self._position)


def _as_fields(value: Any, file: Path, line: int) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise DataError(
        code="data.not_an_object",
        what=f"the row is {type(value).__name__} {shown(value)}",
        where=f"{file}:{line}",
        why="every row is a JSON object with named fields",
        do=f"write the row of {file}:{line} as an object, such as one with the key that --input_key names",
    )


def _refuse_surrogates(value: Any, text: str, file: Path, line: int) -> None:
    """Raise `DataError` for half of a surrogate pair, which parses, but which no tokenizer and no file can take."""
    # most rows have no such escape, and need no second encoding
    if "\\u" not in text or not _SURROGATE.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            code="data.surrogate",
            what=f"half of a surrogate pair, U+{ord(error.object[error.start]):04X}, in {shown(value)}",
            where=f"{file}:{line}",
            why="text must be valid Unicode",
            do=f"replace the escape in {file}:{line} by a whole character",
        ) from error


def _bad_value(error: Exception, file: Path, line: int, text: str, *, cut: bool) -> DataError:
    do = f"correct {file}:{line}"
    if isinstance(error, _RefusedValue):
        line = int(error.__notes__[0]) if hasattr(error, "__notes__") else line
        where = f"{file}:{line}:{error.key}" if error.key else f"{file}:{line}"
        return refused_value(error.what, where=where, why=error.why, do=do)
    if isinstance(error, json.JSONDecodeError):
        line, column = line + error.lineno - 1, error.colno
        ends = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        do = f"mv {file} {file.with_suffix('.jsonl')}" if "JSON Lines" in error.msg else f"correct {file}:{line}"
        if ends and (cut or file.suffix.lower() == ".json"):
            do = f"copy {file} again from its source"
        what = f"{error.msg} at column {column}: {shown(text[max(0, error.pos - 20) : error.pos + 40])}"
        where = f"{file}:{line}:{column}"
        if ends:
            return cut_off(what, where=where, inside="value", do=do)
        return DataError(
            code="data.bad_json", what=what, where=where, why="every row is one complete JSON value", do=do
        )
    reason = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
    return DataError(
        code="data.bad_json",
        what=f"{shown(text)}: {reason}",
        where=f"{file}:{line}",
        why="such a row cannot be used",
        do=do,
    )


def _too_long(file: Path, line: int) -> DataError:
    return DataError(
        code="data.line_too_long",
        what=f"line {line} of {file} is longer than {MAX_LINE_BYTES} bytes",
        where=f"{file}:{line}",
        why="a row of text is never that long; the file has lost its line ends or is not JSON Lines",
        do=f"head -c 1000 {file}",
    )
