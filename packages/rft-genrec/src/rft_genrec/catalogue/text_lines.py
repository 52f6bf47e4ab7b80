"""Lines of text files, plain or compressed with gzip, one at a time; what is no text is refused with its row."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import cast

from rft_core.file_access import access_remedy, closed_place
from rft_genrec.catalogue.file_errors import refused_cell, refused_file

LONGEST_LINE = 1 << 24
"""Bytes; a longer line is no row of data."""
_BOM = b"\xef\xbb\xbf"


def read_lines(path: Path, *, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file with their ends; a byte order mark at its beginning is passed over.

    Raises:
        DataError: the file cannot be read, or a line is too long, holds NUL, or is not of the encoding.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                line = line.removeprefix(_BOM) if number == 1 else line
                if len(line) > LONGEST_LINE:
                    raise refused_cell(path, number, (0, ""), f"a line of at most {LONGEST_LINE:,} bytes", line[:80])
                if b"\0" in line:
                    raise refused_cell(path, number, (0, ""), "text without NUL", line[:80])
                try:
                    yield line.decode(encoding)
                except UnicodeDecodeError as error:
                    found = line[max(0, error.start - 20) : error.start + 20]
                    raise refused_cell(path, number, (0, ""), f"text in {encoding}", found) from error
    except (OSError, EOFError, zlib.error) as error:
        where = f" after line {number}" if number else ""
        raise refused_file(
            path,
            f"cannot be read{where}: {closed_place(path) or error}",
            "a file of text, plain or .gz",
            access_remedy(path),
        ) from error


def _opened(path: Path) -> BufferedIOBase:
    if path.suffix == ".gz":
        return cast("BufferedIOBase", gzip.GzipFile(path, "rb"))
    return path.open("rb")
