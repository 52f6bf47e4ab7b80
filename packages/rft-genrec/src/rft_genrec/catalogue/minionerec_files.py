"""Directories in MiniOneRec's formats: items, semantic IDs, info file and samples, read strictly and written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_text
from rft_genrec.catalogue.csv_samples import read_samples, write_samples
from rft_genrec.catalogue.file_errors import quoted, refuse_closed, refused_file
from rft_genrec.catalogue.index_files import check_info, read_ids, write_index, write_info
from rft_genrec.catalogue.index_seal import check_seal
from rft_genrec.catalogue.inter_files import read_inter
from rft_genrec.catalogue.json_objects import read_numbered
from rft_genrec.catalogue.list_cells import parse_texts
from rft_genrec.catalogue.records import SPLITS, Catalogue, Dataset, Item, Sample, SemanticIds, SplitName

ITEMS = ".item.json"
INDEX = ".index.json"
INFO = "info.txt"
_TEXT_FIELDS = ("title", "description", "brand", "categories")


def read_dataset(directory: str | Path, name: str = "") -> Dataset:
    """Read a catalogue, its IDs if there are any, and the samples of its splits from one directory.

    The directory is one that `rft-train genrec data` wrote, or MiniOneRec's `data/Amazon` with its folders train,
    valid, test, info and index. `name` is that of the catalogue where the directory holds several.

    Example: `read_dataset("data/Amazon", "Office_Products").of("test")` are the samples of `test/Office_Products*.csv`.

    Raises:
        DataError: a file is absent or holds something else, or two do not belong together; with its name, and the row
            and column.
    """
    folder = Path(directory)
    refuse_closed(folder)
    items = _items_file(folder, name)
    catalogue = Catalogue(items.name.removesuffix(ITEMS), read_items(items))
    index = _index_file(items, catalogue.name)
    ids = read_ids(index, len(catalogue)) if index else None
    if index:
        check_seal(index, catalogue)
    info = _only(folder, (f"info/{catalogue.name}*.txt", INFO))
    if info is not None:
        check_info(info, catalogue, ids)
    samples: dict[SplitName, tuple[Sample, ...]] = {}
    for split in SPLITS:
        patterns = (f"{split}.csv", f"{split}/{catalogue.name}*.csv", f"{catalogue.name}.{split}.inter")
        file = _only(folder, patterns)
        if file is not None:
            samples[split] = tuple(_samples(file, split, len(catalogue), ids))
    return Dataset(catalogue, ids, samples)


def read_items(path: Path) -> tuple[Item, ...]:
    """Read `.item.json`: an object of items by their numbers, which are 0 and on."""
    return tuple(_item(path, number, row) for number, row in enumerate(read_numbered(path)))


def write_items(path: Path, catalogue: Catalogue) -> None:
    """Write `.item.json`; a description is the text of a Python list, and categories are joined by commas."""
    rows = {
        str(number): {
            "title": item.title,
            "description": str([item.description]) if item.description else "",
            "brand": item.brand,
            "categories": ",".join(item.categories),
        }
        for number, item in enumerate(catalogue.items)
    }
    replace_text(path, json.dumps(rows, indent=2, ensure_ascii=False))


def write_ids(directory: Path, dataset: Dataset, ids: SemanticIds) -> None:
    """Write the files of a catalogue's directory that hold semantic IDs: the index, the info file, and the samples."""
    write_index(directory / f"{dataset.catalogue.name}{INDEX}", ids, dataset.catalogue)
    write_info(directory / INFO, dataset.catalogue, ids)
    for split, samples in dataset.samples.items():
        write_samples(directory / f"{split}.csv", samples, dataset.catalogue, ids)


def _samples(path: Path, split: SplitName, num_items: int, ids: SemanticIds | None) -> Iterable[Sample]:
    if path.suffix == ".inter":
        return read_inter(path, split, num_items)
    return read_samples(path, split, num_items, ids)


def _item(path: Path, number: int, row: Any) -> Item:
    if not isinstance(row, dict) or not isinstance(row.get("title"), str):
        raise refused_file(path, f"item {number} is {quoted(row)}", "an item is an object with a title, which is text")
    for field in _TEXT_FIELDS:
        value = row.get(field, "")
        is_list = field in ("description", "categories") and isinstance(value, list)
        if not isinstance(value, str) and not (is_list and all(isinstance(part, str) for part in value)):
            what = f"item {number}, {field}: {quoted(value)}"
            raise refused_file(path, what, "texts, or lists of them for description and categories")
    categories = row.get("categories", "")
    names = categories if isinstance(categories, list) else categories.split(",")
    title, brand = str(row["title"]), str(row.get("brand", ""))
    return Item(title, _plain(row.get("description", "")), brand, tuple(name for name in names if name))


def _plain(description: str | list[str]) -> str:
    """Return a description that is a list, or the text of a Python list, as one text."""
    parts = parse_texts(description) if isinstance(description, str) else description
    if parts is None and str(description).startswith("[") and str(description).endswith("]"):
        # MiniOneRec replaced entities after it had written the list, so that a quote may end a text early
        parts = [str(description)[1:-1].strip("\"'")]
    return " ".join(parts) if parts is not None else str(description)


def _items_file(folder: Path, name: str) -> Path:
    found = [file for pattern in ("*.item.json", "index/*.item.json") for file in sorted(folder.glob(pattern))]
    named = [file for file in found if not name or file.name == f"{name}{ITEMS}"]
    if not named:
        there = f"; there are: {', '.join(file.name for file in found)}" if found else ""
        what = f"no file {name or '*'}{ITEMS}{there}"
        raise refused_file(folder, what, "the directory of a catalogue", "rft-train genrec data --save_path DIRECTORY")
    if len(named) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in named)
        what = f"{len(named)} catalogues in one directory: {names}"
        raise refused_file(folder, what, "a catalogue is named, or its directory holds no other", "remove the others")
    return named[0]


def _index_file(items: Path, name: str) -> Path | None:
    """Return the index beside the items: the one of their name, or the only one."""
    own = items.with_name(f"{name}{INDEX}")
    return own if own.is_file() else _only(items.parent, (f"{name}*{INDEX}",))


def _only(folder: Path, patterns: Iterable[str]) -> Path | None:
    """Return the file of the first pattern that has any; None where none has.

    Raises:
        DataError: a pattern has several.
    """
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            what = f"{len(found)} files {pattern}: {names}"
            raise refused_file(folder, what, "one file is read, and which is not guessed", "remove the others")
        if found:
            return found[0]
    return None
