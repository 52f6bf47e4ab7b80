"""Writing one checkpoint: at every instant the folder holds the old state or the new one, whole.

    stage    .staging-step_000100-<pid>-<tag>/ is filled; each file is hashed on the way and
             flushed, then every directory
    list     the manifest is written last, and flushed
    publish  one rename to step_000100, and the folder is flushed
    verify   everything is read back and compared; only then the save counts

A process killed before the rename leaves a staging directory, which no reader looks at and the
next save or opening removes. An earlier checkpoint of the same step is first moved aside; until
the new one is published, readers find it under that name (`layout.published`).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rft_algos.errors import CheckpointError, StorageError
from rft_dist.checkpoints.layout import (
    MANIFEST,
    MODEL,
    STATE,
    is_component_name,
    replaced_name,
    staging_name,
    step_name,
)
from rft_dist.checkpoints.manifest import FileEntry, Manifest, ManifestFault, canonical_json
from rft_dist.checkpoints.operations import (
    DISPLACE,
    MODEL_WRITE,
    PUBLISH,
    RESTORE,
    SPACE,
    VERIFY,
    create_directory,
    digest_file,
    remove_tree,
    rename,
    sync_directory,
    write_file,
)
from rft_dist.checkpoints.reader import Finding, inspect, quarantine, read_manifest
from rft_dist.checkpoints.storage_errors import free_bytes, refused_save, too_little_space
from rft_dist.checkpoints.tensor_file import file_pieces, num_file_bytes

_SLACK_BYTES = 64 * 2**10  # manifest, directories, rounding to blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """All that one checkpoint is made of."""

    directory: Path
    run_id: str
    step: int
    parent_step: int | None
    sequence: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    records: Mapping[str, Any]
    model_writer: Callable[[Path], None]
    """Gets the path of an existing empty directory and fills it."""
    metadata: Mapping[str, Any]
    model_bytes: int
    """Expected size of what `model_writer` writes, for the check of free space."""
    last_good: int | None
    """Step of the newest checkpoint so far, for messages."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components, sorted."""
        return tuple(sorted({*self.tensors, *self.records}))

    @property
    def target(self) -> Path:
        """The published directory."""
        return self.directory / step_name(self.step)


def write_checkpoint(request: SaveRequest) -> Manifest:
    """Write, publish and verify; returns when the checkpoint is on the disk and read back equal.

    Raises CheckpointError, before anything is written, for a record that is no JSON, a component
    name that is a path, or a step that another run saved here. Raises StorageError where the
    system refuses an operation or the disk gives back other bytes; what was staged is removed and
    the checkpoints that were there stay.
    """
    encoded = _encode_records(request)
    _refuse_foreign_target(request)
    need = _SLACK_BYTES + request.model_bytes + sum(len(content) for content in encoded.values())
    need += sum(num_file_bytes(tensors) for tensors in request.tensors.values())
    staging = request.directory / staging_name(request.step, request.run_id)
    try:
        _require_space(request, need)
        manifest = _stage(request, staging, encoded)
        _publish(request, staging)
    except OSError as error:
        _discard(staging)
        raise refused_save(request.step, request.directory, need, error, request.last_good) from error
    return manifest


def restore_displaced(displaced: Path, target: Path) -> None:
    """Settle a checkpoint moved aside by a save that did not finish: the newer one if it verifies, else this one."""
    if os.path.lexists(target):
        _, problems = inspect(target)
        if not problems:
            remove_tree(displaced)
            sync_directory(target.parent)
            return
        if any(problem.quarantined_to is None for problem in quarantine(target, problems)):
            return
    rename(RESTORE, displaced, target)


def _encode_records(request: SaveRequest) -> dict[str, bytes]:
    for name in request.components:
        if not is_component_name(name):
            raise _bad_component(request, name, "letters, digits, _ . - only, and no leading dot")
    _encode(request, "metadata", dict(request.metadata))
    return {name: _encode(request, name, request.records[name]) + b"\n" for name in sorted(request.records)}


def _encode(request: SaveRequest, name: str, value: object) -> bytes:
    try:
        return canonical_json(value)
    except (TypeError, ValueError) as error:
        raise _bad_component(request, name, f"JSON values with text keys and finite numbers: {error}") from error


def _bad_component(request: SaveRequest, name: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        code="checkpoint.bad_component",
        what=f"component {name!r} of step {request.step} cannot be written",
        where=str(request.target),
        why=f"allowed are {allowed}",
        state="nothing was written",
        do=f"give {name!r} another name or value",
    )


def _refuse_foreign_target(request: SaveRequest) -> None:
    if not os.path.lexists(request.target):
        return
    try:
        owner = read_manifest(request.target).run_id
    except (OSError, ManifestFault):
        return  # moved to quarantine when its place is needed
    if owner != request.run_id:
        raise CheckpointError(
            code="checkpoint.step_of_another_run",
            what=f"{request.target} was saved by run {owner}, this is run {request.run_id}",
            where=str(request.target / MANIFEST),
            why="a run replaces its own checkpoints only",
            state="nothing was written",
            do="--save_path with a directory of this run's own",
        )


def _require_space(request: SaveRequest, need: int) -> None:
    with SPACE:
        free = free_bytes(request.directory)
    if free < need:
        raise too_little_space(request.step, request.directory, need, free, request.last_good)


def _stage(request: SaveRequest, staging: Path, encoded: Mapping[str, bytes]) -> Manifest:
    create_directory(staging)
    create_directory(staging / STATE)
    create_directory(staging / MODEL)
    files: list[FileEntry] = []
    for name in sorted(request.tensors):
        file = f"{STATE}/{name}.safetensors"
        files.append(FileEntry(file, write_file(staging / file, file_pieces(request.tensors[name]))))
    for name, content in encoded.items():
        file = f"{STATE}/{name}.json"
        files.append(FileEntry(file, write_file(staging / file, [content])))
    sync_directory(staging / STATE)
    files += _write_model(request, staging)
    manifest = Manifest(
        run_id=request.run_id,
        step=request.step,
        parent_step=request.parent_step,
        sequence=request.sequence,
        components=request.components,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        metadata={"versions": _versions(), **request.metadata},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_file(staging / MANIFEST, [manifest.to_bytes()])
    sync_directory(staging)
    return manifest


def _write_model(request: SaveRequest, staging: Path) -> list[FileEntry]:
    try:
        with MODEL_WRITE:
            request.model_writer(staging / MODEL)
    except SafetensorError as error:  # the library turns the system's error into text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error), str(staging / MODEL)) from error
    return _digest_tree(staging, staging / MODEL)


def _digest_tree(staging: Path, directory: Path) -> list[FileEntry]:
    """Hash and flush everything under `directory`, and the names in it."""
    entries: list[FileEntry] = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            entries += _digest_tree(staging, path)
        else:
            entries.append(FileEntry(path.relative_to(staging).as_posix(), digest_file(path, sync=True)))
    sync_directory(directory)
    return entries


def _publish(request: SaveRequest, staging: Path) -> None:
    displaced = _make_room(request)
    try:
        rename(PUBLISH, staging, request.target)
    except OSError:
        if displaced is not None and not os.path.lexists(request.target):
            rename(RESTORE, displaced, request.target)
        raise
    with VERIFY:
        _, problems = inspect(request.target)
    if problems:
        problems = quarantine(request.target, problems)
        if displaced is not None and not os.path.lexists(request.target):
            rename(RESTORE, displaced, request.target)
        raise _reads_back_differently(request, problems)
    if displaced is not None:
        _discard(displaced)


def _make_room(request: SaveRequest) -> Path | None:
    """Free the final name; gives the place to which a checkpoint that verifies was moved."""
    if not os.path.lexists(request.target):
        return None
    _, problems = inspect(request.target)
    if not problems:
        displaced = request.directory / replaced_name(request.step, request.run_id)
        rename(DISPLACE, request.target, displaced)
        return displaced
    # Whatever holds the name is not a checkpoint that could be used: keep it, under another name.
    quarantine(request.target, [Finding(request.target, "", "held the name of a new checkpoint"), *problems])
    return None


def _reads_back_differently(request: SaveRequest, problems: list[Finding]) -> StorageError:
    return StorageError(
        code="checkpoint.reads_back_differently",
        what=f"step {request.step} was written but reads back differently: {problems[0]}",
        where=str(request.target),
        why="the disk gave back other bytes than were written to it",
        state="the step was not acknowledged; "
        + ("no earlier checkpoint" if request.last_good is None else f"last good step {request.last_good} untouched"),
        do="move the run to another disk",
    )


def _discard(path: Path) -> None:
    """Remove a directory of this save; what cannot be removed now goes at the next save or opening."""
    try:
        remove_tree(path)
        sync_directory(path.parent)
    except OSError:
        return


def _versions() -> dict[str, str]:
    packages = ("rft-dist", "torch", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
