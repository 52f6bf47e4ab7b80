"""Files that one rank writes into the staging directory: hashed while written, flushed, reported to rank 0."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rft_dist.checkpoint_format.file_operations import MODEL_WRITE, digest_file, sync_directory, write_file
from rft_dist.checkpoint_format.layout import MODEL, STATE
from rft_dist.checkpoint_format.manifest import FileEntry, canonical_json, entry_to_json
from rft_dist.checkpoint_format.resharding import BLOCKS, Block, StoredTensor, key_of, to_json
from rft_dist.checkpoint_format.safetensors_pieces import DTYPE_NAMES, file_pieces
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.checkpoints.save_plan import Plan

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class RankParts:
    """Data that one rank contributes to a checkpoint."""

    shards: Mapping[str, Sequence[Shard]]
    records: Mapping[str, bytes]
    """Encoded JSON, from rank 0."""
    model_writer: Callable[[Path], None] | None
    """Fills the directory that it is given, on rank 0; weights too, unless `model_tensors` are given."""
    model_tensors: Mapping[str, Tensor] | None
    """Whole weights that this rank writes, by their names in the Hugging Face directory."""


def write_rank(staging: Path, rank: int, plan: Plan, parts: RankParts) -> dict[str, Any]:
    """Write this rank's files; gives their entries and the tables of their blocks, as JSON."""
    files: list[FileEntry] = []
    tables: dict[str, Any] = {}
    for component in sorted(plan.components):
        file = plan.state_file(component, rank)
        if file is None:
            continue
        shards = parts.shards.get(component, ())
        sharded = plan.is_sharded(component)
        metadata = {BLOCKS: _described(shards)} if sharded else None
        tensors = {key_of(shard): shard.data for shard in shards}
        files.append(FileEntry(file, write_file(staging / file, file_pieces(tensors, metadata))))
        if sharded:
            tables[component] = to_json(_table(file, shards))
            sync_directory((staging / file).parent)
    for name, content in parts.records.items():
        file = f"{STATE}/{name}.json"
        files.append(FileEntry(file, write_file(staging / file, [content])))
    sync_directory(staging / STATE)
    files += _write_model(staging, rank, plan, parts)
    return {"files": [entry_to_json(entry) for entry in files], "tables": tables}


def _described(shards: Sequence[Shard]) -> str:
    """The metadata of a shard file, so that it can be understood without the manifest."""
    described = {key_of(shard): [shard.name, list(shard.global_shape), list(shard.start)] for shard in shards}
    return canonical_json(described).decode("ascii")


def _table(file: str, shards: Sequence[Shard]) -> dict[str, StoredTensor]:
    table: dict[str, StoredTensor] = {}
    for shard in shards:
        block = Block(file, key_of(shard), shard.start, tuple(shard.data.shape))
        known = table.get(shard.name, StoredTensor(DTYPE_NAMES[shard.data.dtype], shard.global_shape, ()))
        table[shard.name] = StoredTensor(known.dtype, known.shape, (*known.blocks, block))
    return table


def _write_model(staging: Path, rank: int, plan: Plan, parts: RankParts) -> list[FileEntry]:
    entries: list[FileEntry] = []
    directory = staging / MODEL
    if parts.model_writer is not None:
        try:
            with MODEL_WRITE:
                parts.model_writer(directory)
        except SafetensorError as error:  # the library turns the system's error into text
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error), str(directory)) from error
        own = {plan.model_file(other) for other in range(len(plan.announced))}  # of other ranks, written meanwhile
        entries += _digest_tree(staging, directory, {directory / name for name in own if name})
    file = plan.model_file(rank)
    if file is not None:
        assert parts.model_tensors is not None
        digest = write_file(directory / file, file_pieces(parts.model_tensors, {"format": "pt"}))
        entries.append(FileEntry(f"{MODEL}/{file}", digest))
    index = plan.model_index()
    # made from what all ranks announced: it does not wait for their files
    if rank == 0 and index is not None:
        content = json.dumps(index, indent=2).encode() + b"\n"
        entries.append(FileEntry(f"{MODEL}/{_INDEX}", write_file(directory / _INDEX, [content])))
    if file is not None or rank == 0:
        sync_directory(directory)
    return entries


def _digest_tree(staging: Path, directory: Path, left_out: set[Path]) -> list[FileEntry]:
    """Hash and flush everything under `directory` but `left_out`, and the names in directories below it."""
    entries: list[FileEntry] = []
    for path in sorted(set(directory.iterdir()) - left_out):
        if path.is_dir() and not path.is_symlink():
            entries += _digest_tree(staging, path, set())
            sync_directory(path)
        else:
            entries.append(FileEntry(path.relative_to(staging).as_posix(), digest_file(path, sync=True)))
    return entries
