"""Files in MiniOneRec's formats: `.item.json`, `.index.json`, CSV files of samples; each read strictly."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_genrec.catalogue.records import SPLITS, Catalogue, Dataset, Item, Sample, SemanticIds, SplitName

csv.field_size_limit(1 << 24)
_COLUMNS = ("user_id", "history_item_id", "item_id")


def read_dataset(directory: str | Path) -> Dataset:
    """Read a catalogue, its IDs if there are any, and the samples of its splits from one directory.

    Raises:
        DataError: a file is absent or holds something else; with its name, and the row and column.
    """
    folder = Path(directory)
    items = _one_file(folder, "*.item.json")
    catalogue = Catalogue(items.name.removesuffix(".item.json"), read_items(items))
    index = sorted(folder.glob("*.index.json"))
    ids = read_ids(index[0], len(catalogue)) if index else None
    samples: dict[SplitName, tuple[Sample, ...]] = {}
    for split in SPLITS:
        files = [*sorted(folder.glob(f"{split}.csv")), *sorted(folder.glob(f"{split}/*.csv"))]
        if files:
            samples[split] = tuple(read_samples(files[0], split, len(catalogue)))
    return Dataset(catalogue, ids, samples)


def read_items(path: Path) -> tuple[Item, ...]:
    """Read `.item.json`: an object of items by their numbers, which are 0 and on."""
    rows = _json(path)
    return tuple(_item(path, number, rows) for number in range(len(rows)))


def read_ids(path: Path, num_items: int) -> SemanticIds:
    """Read `.index.json`: an object of lists of tokens by the numbers of the items."""
    rows = _json(path)
    absent = next((number for number in range(num_items) if str(number) not in rows), None)
    if absent is not None:
        raise _refused(path, f"item {absent} has no semantic ID", f"every one of {num_items} items needs one")
    return SemanticIds(tuple(tuple(rows[str(number)]) for number in range(num_items)))


def read_samples(path: Path, split: SplitName, num_items: int) -> Iterator[Sample]:
    """Yield the samples of a CSV file with the columns user_id, history_item_id (a list literal) and item_id."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise _refused(path, f"column {missing[0]} is missing", f"needed: {', '.join(_COLUMNS)}")
        for number, row in enumerate(reader):
            history, target = _items_of(path, number, row["history_item_id"]), int(row["item_id"])
            outside = next((item for item in (*history, target) if not 0 <= item < num_items), None)
            if outside is not None:
                raise _refused(path, f"row {number + 2}: item {outside}", f"items are 0 to {num_items - 1}")
            yield Sample(f"{split}:{number}", row["user_id"], history, target)


def _items_of(path: Path, number: int, text: str) -> tuple[int, ...]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        what = f"row {number + 2}, column history_item_id: {text[:60]!r}"
        raise _refused(path, what, "a list of item numbers, such as [3, 14]")
    return tuple(value)


def _item(path: Path, number: int, rows: dict[str, Any]) -> Item:
    row = rows.get(str(number))
    if not isinstance(row, dict) or not isinstance(row.get("title"), str):
        raise _refused(path, f"item {number} is absent or has no title", "items are numbered from 0 without gaps")
    return Item(row["title"], _plain(row.get("description", "")), str(row.get("brand", "")))


def _plain(description: Any) -> str:
    """Return a description that is a list, or the text of a Python list, as one text."""
    if isinstance(description, str) and description.startswith("["):
        try:
            description = ast.literal_eval(description)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return description
    return " ".join(map(str, description)) if isinstance(description, list) else str(description)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {error}", "a JSON object") from error
    if not isinstance(value, dict):
        raise _refused(path, f"holds a {type(value).__name__}", "a JSON object")
    return value


def _one_file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise _refused(
            folder, f"no file {pattern}", "the directory of a catalogue, as `rft-train genrec data` writes it"
        )
    return found[0]


def _refused(path: Path, what: str, why: str) -> DataError:
    return DataError(code="genrec.file", what=what, where=str(path), why=why, do=f"mend {path.name}, or make it anew")
