"""Rows of CSV and TSV files: a header, then records of exactly as many fields; every value is text."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rft_core.errors import DataError
from rft_trainer.data.readers.files import BYTE_ORDER_MARK, cut_off, decode_text, no_rows, open_data_file
from rft_trainer.data.readers.rows import Row, SkipLog, shown

_MAX_FIELD_CHARACTERS = 64 * 1024 * 1024


def read_csv(file: Path, skips: SkipLog, *, delimiter: str = "") -> list[Row]:
    """Read records with a header; quoted fields may hold line ends (RFC 4180).

    Fields are separated by `delimiter`; where none is given, by commas, or by what the header has in their place:
    semicolons or tabs, as spreadsheets write them.
    """
    with open_data_file(file) as stream:
        raw = stream.read()
    text = decode_text(raw.removeprefix(BYTE_ORDER_MARK), file)
    # The limit is a setting of the whole process; it is put back for who else reads CSV.
    previous = csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    try:
        rows = _records(text, file, skips, delimiter or _delimiter_of(text))
    finally:
        csv.field_size_limit(previous)
    if not rows:
        raise no_rows(file)
    return rows


def _delimiter_of(text: str) -> str:
    """What separates the names of the first line that has any."""
    header = next((line for line in io.StringIO(text) if line.strip()), "")
    return next((symbol for symbol in ",;\t" if symbol in header), ",")


def _records(text: str, file: Path, skips: SkipLog, delimiter: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    header: list[str] | None = None
    while True:
        # before the record is read: a quoted field may reach over several lines
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise _bad_csv(error, file, line) from error
        if values is None:
            return rows
        # a blank line, at the end of many files
        if not values:
            continue
        if header is None:
            header = _checked_header(values, file, line)
        elif len(values) != len(header):
            skips.take(_unequal(values, header, file, line))
        else:
            rows.append(Row(dict(zip(header, values, strict=True)), str(file), line))


def _checked_header(names: list[str], file: Path, line: int) -> list[str]:
    earlier: set[str] = set()
    for position, name in enumerate(names):
        if not name.strip() or name in earlier:
            fault = "has no name" if not name.strip() else f"is named {shown(name)} as an earlier one is"
            raise DataError(
                code="data.bad_header",
                what=f"column {position + 1} of {len(names)} {fault}",
                where=f"{file}:{line}:{name.strip() or position + 1}",
                why="the first record of a CSV file names each column once",
                do=f"give every column in line {line} of {file} its own name",
            )
        earlier.add(name)
    return names


def _bad_csv(error: csv.Error, file: Path, line: int) -> DataError:
    what, where = f"the record that starts on line {line}: {error}", f"{file}:{line}"
    if "unexpected end of data" in str(error):
        return cut_off(what, where=where, inside="quoted field", do=f"copy {file} again from its source")
    why = "quotes inside a quoted field are doubled"
    return DataError(code="data.bad_csv", what=what, where=where, why=why, do=f"correct {where}")


def _unequal(values: list[str], header: list[str], file: Path, line: int) -> DataError:
    field = header[len(values)] if len(values) < len(header) else str(len(header) + 1)
    return DataError(
        code="data.unequal_row",
        what=f"{len(values)} values for {len(header)} columns {shown(header)}",
        where=f"{file}:{line}:{field}",
        why="every record has one value for each column",
        do=f"correct {file}:{line}",
    )
