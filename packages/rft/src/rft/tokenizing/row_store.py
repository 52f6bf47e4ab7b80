"""The store of a run's training rows: when it is used, what its name follows from, and what it holds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.tokenizing.kinds import StoredRowsText
from rft.tokenizing.store_space import within
from rft.tokenizing.texts import tokenizer_digest
from rft_core.errors import OptionsError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.readers.arrow import count_parquet
from rft_trainer.data.readers.formats import resolve_files
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.sources import SourceSpec
from rft_trainer.data.store.build import BuildShards, build_store, first_row, in_this_process, row_at
from rft_trainer.data.store.content_hash import kept_content_hash
from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.data.store.shard_plan import SUFFIXES
from rft_trainer.data.store.shards import VERSION, ShardFacts
from rft_trainer.data.store.worker_pool import FEWEST_SHARDS, BuildWorkers, available_cores, in_workers
from rft_trainer.data.task_rows import is_task
from rft_trainer.data.token_shards.open import store_directory
from rft_trainer.runs.stop_signals import stop_requested
from rft_trainer.settings.data import StoredRowsSettings

_LOG = logging.getLogger(__name__)
_AUTO_BYTES, _AUTO_RECORDS = 16 * 1024**2, 1 << 17
"""Bytes of all files, and records of parquet files, which are compressed, from which on `auto` makes a store.

Measured on prompts of 92 bytes (`benchmarks/data_start.py`): rows in memory cost 74 us of CPU and 2 kB each at every
start, those of a store 51 us once and 1 us later. Below, a start takes seconds in either way, and a store is no use.
"""
_LARGEST_FACTOR = 8
"""Bytes of a store to one of the files, at most: text of one token a byte takes 4 bytes a token, beside the text."""
_OWN_HASH_BYTES = 256 * 1024**2
"""Above it a store that `auto` makes has a hash and, above `MOST_IN_MEMORY` rows, an order of its own.

Up to it rows have the hash and the order that they have in memory. It is where `auto` once began: earlier runs of
fewer bytes, whose rows were in memory, go on with a store, and those of more with the store that they had.
"""

MOST_IN_MEMORY = 1 << 20
"""Rows whose order is that of a run without a store; above them it is computed place by place, and is another one."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The training rows of a run in a store."""

    directory: Path
    specs: tuple[SourceSpec, ...]
    files: Sequence[Sequence[Path]]
    """Files of each source."""
    samples: StoredSamples
    sizes: tuple[int, ...]
    """Samples of each source."""
    num_rows: int
    num_loss_tokens: int
    longest: int
    too_long: tuple[tuple[str, int], ...]
    counts: Counter[str]
    """Numbers of rows that are told to people, by the names of what tokenises them."""
    data_hash: str
    as_in_memory: bool = False
    """Whether hash and order are those of the rows in memory, however many they are."""

    def row(self, name: str) -> Row:
        """Return the row of a sample, "<source>:<number>", as its file has it; all rows before it are read."""
        source, _, number = name.rpartition(":")
        index = [spec.name for spec in self.specs].index(source)
        return row_at(self.files[index], int(number))

    def sizes_without(self, names: Iterable[str], samples_a_row: int = 1) -> tuple[int, ...]:
        """Return the rows of each source without those of these ids, each of which is "<source>:<number>"."""
        gone = Counter(name.rpartition(":")[0] for name in names)
        return tuple(size // samples_a_row - gone[spec.name] for size, spec in zip(self.sizes, self.specs, strict=True))

    def mixture(self, without: Iterable[str], samples_a_row: int = 1) -> Mixture:
        """Return the mixture by which an epoch visits the rows, without those of these ids."""
        known = [spec.probability for spec in self.specs if spec.probability is not None]
        probabilities = known if len(known) == len(self.specs) else None
        sizes = self.sizes_without(without, samples_a_row)
        if self.as_in_memory:
            return Mixture(sizes, probabilities)
        return Mixture(sizes, probabilities, most_in_memory=MOST_IN_MEMORY)

    def lines(self, samples_a_row: int = 1, noun: str = "samples", longest: str = "longest sample") -> list[str]:
        """Return the lines of the plan."""
        lines = [
            f"source {spec.name}: {size // samples_a_row:,} {noun} from {spec.place}"
            for spec, size in zip(self.specs, self.sizes, strict=True)
        ]
        kept = len(self.samples) // samples_a_row
        lines.append(f"{kept:,} of {self.num_rows:,} rows fit ({longest} {self.longest} tokens)")
        return [*lines, f"tokens are mapped from the data store {self.directory}"]


def wants_store(
    data: StoredRowsSettings,
    tokenizer: HfTokenizer,
    *,
    images_key: str = "",
    reason: str = "",
    in_pairs: bool = False,
) -> bool:
    """Return whether the training rows go into a store.

    Args:
        data: names the rows, and says whether a store is wanted.
        tokenizer: makes their tokens.
        images_key: column of images; no store holds such rows.
        reason: what else of the settings speaks against a store; empty = nothing.
        in_pairs: whether the rows are pairs, whose hash in memory no store has: `auto` keeps more of them there.

    Raises:
        OptionsError: a store is asked for, and these rows cannot be in one.
    """
    if data.data_store == "off" or not data.prompt_data:
        return False
    reason = reason or _reason_against(data, tokenizer, images_key)
    if data.data_store == "on":
        if reason:
            raise OptionsError(
                code="data.no_store",
                what=f"data_store is on, but {reason}",
                where="--data_store",
                why="a store holds the tokens of .jsonl and .parquet rows of text",
                do="--data_store off",
            )
        return True
    return not reason and _are_many(_files(data), in_pairs=in_pairs) and _has_room(data)


def _has_room(data: StoredRowsSettings) -> bool:
    """Return whether a store that nobody asked for can be written; else the rows stay in memory, and it is said."""
    root = store_directory(data.data_store_path)
    place = next(path for path in (root, *root.parents) if path.exists())
    needed = _LARGEST_FACTOR * _num_bytes(_files(data))
    if os.access(place, os.W_OK) and shutil.disk_usage(place).free > needed:
        return True
    _LOG.warning(
        "the training rows stay in memory: a store of their tokens in %s would take up to %.1f GB, and %s; "
        "--data_store_path names another place",
        *(root, needed / 1e9),
        "less is free there" if os.access(place, os.W_OK) else f"{place} cannot be written",
    )
    return False


def _are_many(files: Sequence[Sequence[Path]], *, in_pairs: bool) -> bool:
    if in_pairs:
        return _num_bytes(files) > _OWN_HASH_BYTES
    parquet = [file for one in files for file in one if file.suffix.lower() == ".parquet"]
    return _num_bytes(files) > _AUTO_BYTES or sum(map(count_parquet, parquet)) > _AUTO_RECORDS


def _num_bytes(files: Sequence[Sequence[Path]]) -> int:
    return sum(file.stat().st_size for one in files for file in one)


def _reason_against(data: StoredRowsSettings, tokenizer: HfTokenizer, images_key: str) -> str:
    if images_key:
        return "the rows have images"
    if data.max_samples:
        return f"max_samples = {data.max_samples} chooses among the rows"
    if getattr(tokenizer.hf_tokenizer, "backend_tokenizer", None) is None:
        return "the tokenizer has no tokenizer.json, from which the name of a store follows"
    specs = located_sources(data.prompt_data, None, split=data.prompt_split, flag="--prompt_data")
    task = next((spec.path for spec in specs if is_task(spec.path)), "")
    if task:
        return f"{task} is a task"
    others = [file for files in _files(data) for file in files if file.suffix.lower() not in SUFFIXES]
    return f"{others[0]} is another file" if others else ""


def stored_sources(data: StoredRowsSettings) -> tuple[SourceSpec, ...]:
    """Return the sources of the training rows."""
    probabilities = data.prompt_data_probs or None
    return located_sources(data.prompt_data, probabilities, split=data.prompt_split, flag="--prompt_data")


def first_rows_of_sources(data: StoredRowsSettings) -> list[Row]:
    """Return the first row of every source, whose columns are those of the source."""
    return [first_row(files) for files in _files(data)]


def _files(data: StoredRowsSettings) -> list[list[Path]]:
    split = data.prompt_split or None
    return [list(spec.files) or resolve_files(spec.path, split=split) for spec in stored_sources(data)]


def open_store(
    data: StoredRowsSettings,
    tokenizer: HfTokenizer,
    rows: StoredRowsText,
    all_left_out: Callable[[Sequence[tuple[str, int]], Counter[str]], Exception],
) -> StoredRows:
    """Build what is missing of the store of the training rows, and open it.

    Args:
        data: names the rows and the place of the store.
        tokenizer: makes their tokens.
        rows: what is tokenised, and how.
        all_left_out: makes the error of rows none of which fits, from those that are too long and from the counts.

    Raises:
        DataError: a row cannot be used, or none fits.
    """
    specs, files = stored_sources(data), _files(data)
    if data.data_store == "auto" and rows.kind in ("prompts", "demonstrations"):
        rows = replace(rows, hashes_rows=_num_bytes(files) <= _OWN_HASH_BYTES)
    root = store_directory(data.data_store_path)
    directory = root / _name(rows, files, tokenizer)
    _LOG.info("training rows are tokenised into %s", directory, extra=ASIDE)
    build = _builder(directory, files, rows, tokenizer, data.data_store_workers)
    build = within(root, directory, data.data_store_max_gb, build)
    shards = build_store(directory, files, build, hashes_rows=rows.hashes_rows)
    samples = StoredSamples(directory, shards, [spec.name for spec in specs])
    too_long = tuple(row for facts in shards for row in facts.too_long)
    counts: Counter[str] = Counter()
    for facts in shards:
        counts.update(facts.counts)
    if not len(samples):
        raise all_left_out(too_long, counts)
    return StoredRows(
        directory,
        specs,
        files,
        samples,
        samples.sizes(len(specs)),
        num_rows=sum(facts.num_rows for facts in shards),
        num_loss_tokens=sum(facts.num_loss_tokens for facts in shards),
        longest=max(facts.longest for facts in shards),
        too_long=too_long,
        counts=counts,
        data_hash=kept_content_hash(directory) if rows.hashes_rows else _hash_of_shards(shards),
        as_in_memory=rows.hashes_rows,
    )


def _hash_of_shards(shards: Sequence[ShardFacts]) -> str:
    return hashlib.sha256("".join(facts.sha256 for facts in shards).encode()).hexdigest()


def _builder(
    directory: Path, files: Sequence[Sequence[Path]], rows: StoredRowsText, tokenizer: HfTokenizer, num_workers: int
) -> BuildShards:
    """Return what builds the shards: this process, or workers that load the tokenizer from its directory."""
    here = in_this_process(directory, files, rows.tokenizer_of_rows(tokenizer), stopped=stop_requested)
    # one that was made in memory is nowhere for another process to load it from
    if not Path(tokenizer.where).is_dir():
        return here
    workers = BuildWorkers(
        [sys.executable, "-P", "-m", "rft.tokenizing.worker_main"],
        {"tokenizer": tokenizer.where, "digest": tokenizer_digest(tokenizer), "rows": rows.as_record()},
        num_workers or available_cores(),
        2 if num_workers else FEWEST_SHARDS,
    )
    return in_workers(directory, files, workers, here, stopped=stop_requested)


def _name(rows: StoredRowsText, files: Sequence[Sequence[Path]], tokenizer: HfTokenizer) -> str:
    """Return the name of a store: of the files by place, size and time, and of all that the tokens follow from."""
    stats = [[(str(file.resolve()), file.stat()) for file in one] for one in files]
    record: dict[str, Any] = {
        "version": VERSION,
        "files": [[(path, stat.st_size, stat.st_mtime_ns) for path, stat in one] for one in stats],
        "rows": rows.as_record(),
        "tokenizer": tokenizer_digest(tokenizer),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]
