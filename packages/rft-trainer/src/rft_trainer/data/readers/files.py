"""Opening and decoding of data files, with the location of every failure."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rft_core.durable_files import kind_of
from rft_core.errors import DataError, OptionsError
from rft_core.fault_points import declare, fault_point
from rft_core.file_access import access_remedy, closed_place

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OPEN = declare("data.open", "before a data file is opened")
_READ_END = declare("data.read_end", "after the last byte of a data file was read")


def unreadable(file: Path, error: OSError) -> DataError:
    """Build the error for a file that the operating system cannot read."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    is_closed = isinstance(error, PermissionError)
    return DataError(
        code="data.unreadable",
        what=f"cannot read {file}: {name} ({error.strerror or error})",
        where=str(file),
        why=(closed_place(file) if is_closed else "") or "a data file must be a regular file that this user can read",
        do=(access_remedy(file) if is_closed else "") or f"ls -l {file}",
    )


def refuse_special(file: Path) -> None:
    """Raise `DataError` for a pipe, a socket or a device in the place of a file.

    What is not there, and a directory, are refused by the system when they are opened.
    """
    kind = kind_of(file)
    if kind in ("a file", "a directory", "not there"):
        return
    copied = shlex.quote(f"{file.stem}_copy{file.suffix}")
    raise DataError(
        code="data.not_a_file",
        what=f"{file} is {kind}",
        where=str(file),
        why="data are read more than once, and a resumed run reads them again: they must be a regular file",
        do=f"cat {shlex.quote(str(file))} > {copied}, and name that" if kind == "a pipe" else f"ls -l {file}",
    )


@contextmanager
def open_data_file(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; `DataError` when it cannot be read or changes meanwhile."""
    try:
        fault_point(_OPEN)
        # before it is opened: to open a pipe waits until somebody writes to it
        refuse_special(file)
        with file.open("rb") as stream:
            before = os.fstat(stream.fileno())
            # by its own name: a parser would speak of a missing value on line 1
            if before.st_size == 0:
                raise _empty(file)
            yield stream
            fault_point(_READ_END)
            # by path and not by descriptor: a file that was replaced meanwhile is another one
            after = file.stat()
    except OSError as error:
        raise unreadable(file, error) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(
            code="data.changed",
            what=f"{file} changed while it was read: {before.st_size} bytes before, {after.st_size} after",
            where=str(file),
            why="a run needs one fixed version of its data",
            do=f"wait until nothing writes to {file}, then start again",
        )


def _empty(file: Path) -> DataError:
    return DataError(
        code="data.empty",
        what=f"{file} has 0 bytes",
        where=f"{file}:1",
        why="a data file must hold at least one row",
        do=f"write rows to {file} or leave it out of --prompt_data",
    )


def no_rows(file: Path) -> DataError:
    """Build the error for a well-formed file without rows."""
    return DataError(
        code="data.no_rows",
        what=f"{file} holds 0 rows",
        where=f"{file}:1",
        why="a data file must hold at least one row",
        do=f"write rows to {file} or leave it out of --prompt_data",
    )


def not_utf8(
    error: UnicodeDecodeError,
    text: str,
    *,
    where: str,
    do: str,
    why: str = "text must be UTF-8",
    offset: int = 0,
) -> DataError:
    """Build the error for bytes that are no text; `text` says what they are of, and `offset` where they begin in it."""
    return DataError(
        code="data.not_utf8",
        what=f"byte {offset + error.start} of {text} is 0x{error.object[error.start]:02x}: {error.reason}",
        where=where,
        why=why,
        do=do,
    )


def cut_off(what: str, *, where: str, inside: str, do: str) -> DataError:
    """Build the error for a text that ends inside a value."""
    return DataError(code="data.cut", what=what, where=where, why=f"the text ends inside a {inside}", do=do)


def no_such_split(directory: Path, split: str | None, splits: Sequence[object], why: str) -> OptionsError:
    """Build the error for a directory of several splits, without the one that was chosen or with none chosen."""
    chosen = "no split is chosen" if split is None else f"there is no split {split!r}"
    return OptionsError(
        code="data.split",
        what=f"{chosen}; {directory} holds {', '.join(map(str, splits))}",
        where="--prompt_split",
        why=why,
        do=f"--prompt_split {splits[0]}",
    )


def decode_text(raw: bytes, file: Path, *, first_line: int = 1, offset: int = 0) -> str:
    """Decode `raw`, which begins at `first_line` and byte `offset` of the file, as UTF-8.

    Refuses bytes that are not UTF-8 and NUL characters, naming line, column and byte.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        # only the head of the file shows that it is UTF-16 or gzip
        start = raw if offset == 0 else b""
        where, do = f"{file}:{line}:{column}", _how_to_convert(start, file)
        raise not_utf8(error, str(file), where=where, do=do, why=_why_not_utf8(start), offset=offset) from error
    position = text.find("\0")
    if position >= 0:
        line = first_line + text.count("\n", 0, position)
        column = position - (text.rfind("\n", 0, position) + 1) + 1
        raise DataError(
            code="data.nul",
            what=f"character {column} of line {line} is NUL",
            where=f"{file}:{line}:{column}",
            why="a NUL in a text file is the mark of a damaged copy or of a binary file",
            do=f"copy {file} again from its source",
        )
    return text


def _why_not_utf8(head: bytes) -> str:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "the file starts as UTF-16 does; text must be UTF-8"
    if head[:2] == b"\x1f\x8b":
        return "the file starts as gzip does; compressed files are not read"
    return "text must be UTF-8"


def _how_to_convert(head: bytes, file: Path) -> str:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"iconv -f UTF-16 -t UTF-8 {file} > {file}.utf8{file.suffix}"
    if head[:2] == b"\x1f\x8b":
        return f"gunzip -c {file} > {file.with_suffix('')}.plain{file.suffix}"
    return f"iconv -f LATIN1 -t UTF-8 {file} > {file}.utf8{file.suffix}"
