"""Files of a catalogue that hold semantic IDs: the index, the samples' columns of IDs, the list of items."""

from __future__ import annotations

import ast
import csv
import io
import shutil
from collections.abc import Sequence
from pathlib import Path

from rft_core.durable_files import replace_text
from rft_core.errors import OptionsError
from rft_genrec.catalogue import index_files
from rft_genrec.catalogue.csv_samples import read_samples
from rft_genrec.catalogue.records import SPLITS, Catalogue, SemanticIds, SplitName

_IDS = ("history_item_sid", "item_sid")


def index_file(folder: Path, name: str) -> Path:
    """Return the place of the IDs of a catalogue."""
    return folder / f"{name}.index.json"


def refuse_overwriting(folder: Path) -> None:
    """Refuse to write IDs where there are some.

    Raises:
        OptionsError: the directory has a file of IDs.
    """
    found = sorted(folder.glob("*.index.json"))
    if found:
        raise OptionsError(
            code="genrec.ids_exist",
            what=f"{found[0]} is there",
            where="--save_path" if folder.name else "--catalogue",
            why="models that were trained on these IDs do not understand others",
            do="--save_path DIRECTORY for a new catalogue with the new IDs, or --overwrite",
        )


def write_index(file: Path, catalogue: Catalogue, tokens: Sequence[Sequence[str]]) -> None:
    """Write `.index.json`, the tokens of every item by its number, and its seal."""
    index_files.write_index(file, SemanticIds(tuple(map(tuple, tokens))), catalogue)


def check_samples(folder: Path, num_items: int) -> None:
    """Read the samples whose columns of IDs are to be written anew, before anything is written.

    Raises:
        DataError: a row is not as its file declares it; with the file, the row and the column.
    """
    for split in SPLITS:
        for file in _files_of(folder, split):
            for _ in read_samples(file, split, num_items):
                pass


def copy_catalogue(source: Path, items: Path, folder: Path) -> None:
    """Copy the items and the samples of a catalogue into another directory."""
    for file in [items, *_sample_files(source)]:
        target = folder / (file.name if file == items else file.relative_to(source))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != file.resolve():
            shutil.copyfile(file, target)


def renew_samples(folder: Path, catalogue: Catalogue, tokens: Sequence[Sequence[str]]) -> int:
    """Write the columns of IDs of the samples, and info.txt, anew; return the number of files.

    A file without those columns stays as it is: the IDs of items are read from the index.
    """
    texts = ["".join(one) for one in tokens]
    renewed = sum(_renew(file, texts) for file in _sample_files(folder))
    lines = [
        f"{texts[n]}\t{' '.join(item.title.split())}\t{n}\n" for n, item in enumerate(catalogue.items) if n < len(texts)
    ]
    replace_text(folder / "info.txt", "".join(lines))
    return renewed + 1


def _sample_files(folder: Path) -> list[Path]:
    return [file for split in SPLITS for file in _files_of(folder, split)]


def _files_of(folder: Path, split: SplitName) -> list[Path]:
    return [*folder.glob(f"{split}.csv"), *sorted(folder.glob(f"{split}/*.csv"))]


def _renew(file: Path, texts: Sequence[str]) -> bool:
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        columns = list(reader.fieldnames or [])
        if not set(_IDS) & set(columns):
            return False
        written = io.StringIO()
        writer = csv.DictWriter(written, columns, lineterminator="\n")
        writer.writeheader()
        for row in reader:
            history = [texts[item] for item in ast.literal_eval(row["history_item_id"])]
            row |= {name: value for name, value in zip(_IDS, (str(history), texts[int(row["item_id"])])) if name in row}  # noqa: B905
            writer.writerow(row)
    replace_text(file, written.getvalue())
    return True
