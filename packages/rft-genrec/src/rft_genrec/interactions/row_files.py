"""Rows of data files by the names of their columns: JSON lines, tables with a heading, `::` files, parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_genrec.catalogue.csv_samples import read_table
from rft_genrec.catalogue.file_errors import refused_cell, refused_file
from rft_genrec.catalogue.text_lines import read_lines
from rft_genrec.interactions.schemas import RowReader

Rows = Iterator[tuple[int, Mapping[str, Any] | DataError]]
_TABLE_FORMS = "a file .csv, .tsv, .jsonl, .json or .parquet, the first four also as .gz"


def read_rows(reader: RowReader) -> Iterator[tuple[Any, ...]]:
    """Yield the values of every row of a file, whose form its name tells.

    Raises:
        DataError: the file or a row is not as declared; with the row and the column.
    """
    kind = reader.path.with_suffix("").suffix if reader.path.suffix == ".gz" else reader.path.suffix
    if kind in (".json", ".jsonl"):
        return reader.read(json_rows(reader.path))
    if kind in (".csv", ".tsv"):
        return reader.read(table_rows(reader, "," if kind == ".csv" else "\t"))
    if kind == ".parquet":
        return reader.read(parquet_rows(reader))
    raise refused_file(reader.path, f"is a file {kind or 'without a suffix'}", _TABLE_FORMS, "rename or convert it")


def json_rows(path: Path) -> Rows:
    """Yield the objects of a file with one JSON object a line; empty lines are passed over."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            yield number, _object(path, number, line)


def _object(path: Path, number: int, line: str) -> dict[str, Any] | DataError:
    try:
        value = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return refused_cell(path, number, (0, ""), "a JSON object", line.strip())


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def table_rows(reader: RowReader, delimiter: str) -> Rows:
    """Yield the rows of a table by the names in its heading; a cell that is empty is absent."""
    rows = read_table(reader.path, delimiter)
    _, heading = next(rows, (1, []))
    reader.check_heading(heading)
    for number, cells in rows:
        yield number, {name: cell for name, cell in zip(heading, cells, strict=True) if cell}


def separated_rows(path: Path, separator: str, names: Sequence[str], encoding: str) -> Rows:
    """Yield the rows of a file without a heading, whose cells a separator divides; more cells than names are left."""
    for number, line in enumerate(read_lines(path, encoding=encoding), 1):
        cells = line.rstrip("\r\n").split(separator)
        if len(cells) < len(names):
            found = f"{len(cells)} cells: {line.strip()}"
            yield number, refused_cell(path, number, (0, ""), f"{len(names)} cells divided by {separator}", found)
        else:
            yield number, {name: cell for name, cell in zip(names, cells, strict=False) if cell}


def parquet_rows(reader: RowReader) -> Rows:
    """Yield the rows of a parquet file, some thousands of which are in memory at a time."""
    import pyarrow as pa  # here, so that other sources do not wait for it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(reader.path) as file:
            heading = file.schema_arrow.names
            reader.check_heading(heading)
            wanted = [column.name for column in reader.columns if column.name in heading]
            number = 0
            for batch in file.iter_batches(batch_size=4096, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pa.ArrowException) as error:
        raise refused_file(reader.path, f"cannot be read: {error}", "a parquet file") from error
