"""The directory of a catalogue, written at once or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rft_core.durable_files import replace_text, storage_errors
from rft_genrec.catalogue.csv_samples import write_samples
from rft_genrec.catalogue.index_files import write_index, write_info
from rft_genrec.catalogue.inter_files import write_inter, write_numbers, write_reviews, write_sequences
from rft_genrec.catalogue.minionerec_files import INDEX, INFO, write_items
from rft_genrec.catalogue.records import Dataset
from rft_genrec.interactions.splits import UserSequences

_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Prepared:
    """The content of a directory of a catalogue."""

    dataset: Dataset
    sequences: UserSequences | None
    """None where only samples are known, as of a directory that was read."""
    more: Mapping[str, str]
    """Texts of further files by their names."""
    reviews: dict[tuple[int, int, int], tuple[str, str]] = field(
        default_factory=dict[tuple[int, int, int], tuple[str, str]]
    )
    """(user, item, time) -> (text, summary); empty = no file of reviews."""


def write_prepared(target: Path, prepared: Prepared) -> None:
    """Write all files into a directory beside `target`, and give it that name when it is complete.

    Raises:
        StorageError: the disk refuses.
    """
    with storage_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(folder, prepared)
        with storage_errors("write", target):
            folder.chmod(_MODE)
            # an empty directory of that name is replaced
            os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, prepared: Prepared) -> None:
    dataset = prepared.dataset
    stem = folder / dataset.catalogue.name
    write_items(stem.with_name(f"{stem.name}.item.json"), dataset.catalogue)
    write_info(folder / INFO, dataset.catalogue, dataset.ids)
    if dataset.ids is not None:
        write_index(stem.with_name(f"{stem.name}{INDEX}"), dataset.ids, dataset.catalogue)
    for split, samples in dataset.samples.items():
        write_samples(folder / f"{split}.csv", samples, dataset.catalogue, dataset.ids)
        write_inter(stem.with_name(f"{stem.name}.{split}.inter"), samples)
    if prepared.sequences is not None:
        write_sequences(stem.with_name(f"{stem.name}.inter.json"), prepared.sequences.items)
        write_numbers(stem.with_name(f"{stem.name}.user2id"), prepared.sequences.user_names)
        write_numbers(stem.with_name(f"{stem.name}.item2id"), prepared.sequences.item_names)
    if prepared.reviews:
        write_reviews(stem.with_name(f"{stem.name}.review.json"), prepared.reviews)
    for name, text in prepared.more.items():
        replace_text(folder / name, text)
