"""CSV files of samples with MiniOneRec's columns, read strictly and written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_text
from rft_genrec.catalogue.file_errors import quoted, refused_cell, refused_file, refused_index
from rft_genrec.catalogue.list_cells import parse_numbers, parse_texts
from rft_genrec.catalogue.records import Catalogue, Sample, SemanticIds, SplitName
from rft_genrec.catalogue.text_lines import LONGEST_LINE, read_lines

COLUMNS = (
    "user_id",
    "history_item_title",
    "item_title",
    "history_item_id",
    "item_id",
    "history_item_sid",
    "item_sid",
)
"""Columns of MiniOneRec's CSV files, in their order; histories are lists as Python writes them."""
_NEEDED = ("user_id", "history_item_id", "item_id")
_MOST_DIGITS = 12


def read_table(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield (row, cells) of a table with a heading, which is row 1; quotes must be closed, every row as wide as it.

    Raises:
        DataError: a row is no row of a table; with its number.
    """
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(read_lines(path), delimiter=delimiter, strict=True)
    row, width = 0, 0
    try:
        for cells in reader:
            row += 1
            width = width or len(cells)
            if len(cells) != width and cells:
                raise refused_cell(path, row, (0, ""), f"{width} cells, as the heading has", f"{len(cells)} cells")
            if cells:
                yield row, cells
    except csv.Error as error:
        raise refused_cell(path, row + 1, (0, ""), "a row whose quotes are closed", str(error)) from error


def read_samples(path: Path, split: SplitName, num_items: int, ids: SemanticIds | None = None) -> Iterator[Sample]:
    """Yield the samples of a CSV file with the columns user_id, history_item_id (a list literal) and item_id.

    Where there are IDs and the file has columns of them too, both must agree.
    """
    rows = read_table(path)
    _, heading = next(rows, (1, []))
    missing = [column for column in _NEEDED if column not in heading]
    if missing:
        why = f"needed: {', '.join(_NEEDED)}; found: {', '.join(heading)[:200]}"
        raise refused_file(path, f"row 1: column {missing[0]} is missing", why)
    at = {name: heading.index(name) for name in (*COLUMNS,) if name in heading}
    for number, (row, cells) in enumerate(rows):
        reader = _SampleRow(path, row, at, cells, num_items)
        sample = Sample(f"{split}:{number}", reader.text("user_id"), reader.history(), reader.item())
        if ids is not None:
            reader.check_ids(sample, ids)
        yield sample


def write_samples(path: Path, samples: Iterable[Sample], catalogue: Catalogue, ids: SemanticIds | None) -> None:
    """Write a CSV file of samples; without IDs their two columns are empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for sample in samples:
        titles = [catalogue.items[item].title for item in sample.history]
        history = [ids.text(item) for item in sample.history] if ids else []
        target = ids.text(sample.target) if ids else ""
        title = catalogue.items[sample.target].title
        writer.writerow((sample.user, titles, title, list(sample.history), sample.target, history, target))
    replace_text(path, text.getvalue())


class _SampleRow:
    """Cells of one row by the names of their columns."""

    def __init__(self, path: Path, row: int, at: dict[str, int], cells: Sequence[str], num_items: int) -> None:
        self._path, self._row, self._at, self._cells, self._num_items = path, row, at, cells, num_items

    def text(self, column: str) -> str:
        """Return a cell that must not be empty."""
        found = self._cells[self._at[column]].strip()
        if not found:
            raise self._refused(column, "text that is not empty")
        return found

    def history(self) -> tuple[int, ...]:
        numbers = parse_numbers(self.text("history_item_id"))
        if numbers is None:
            raise self._refused("history_item_id", "a list of item numbers, such as [3, 14]")
        return tuple(self._known("history_item_id", item) for item in numbers)

    def item(self) -> int:
        """Return the number of the target."""
        text = self.text("item_id")
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise self._refused("item_id", "the number of an item")
        return self._known("item_id", int(text))

    def check_ids(self, sample: Sample, ids: SemanticIds) -> None:
        """Refuse a row whose IDs are not those of its items; empty cells of IDs say nothing."""
        expected: dict[str, Any] = {
            "history_item_sid": [ids.text(item) for item in sample.history],
            "item_sid": ids.text(sample.target),
        }
        for column, own in expected.items():
            found = self._cells[self._at[column]] if column in self._at else ""
            if found in ("", "[]") or found == str(own):
                continue
            texts = parse_texts(found) if column == "history_item_sid" else None
            if texts is None or list(texts) != own:
                what = f"row {self._row}, column {column}: the index has {quoted(own)}, the row {quoted(found)}"
                raise refused_index(self._path, what, "the samples were written with another index")

    def _known(self, column: str, item: int) -> int:
        if item >= self._num_items:
            raise self._refused(column, f"items from 0 to {self._num_items - 1}")
        return item

    def _refused(self, column: str, expected: str) -> Exception:
        place = self._at[column]
        return refused_cell(self._path, self._row, (place + 1, column), expected, self._cells[place])
