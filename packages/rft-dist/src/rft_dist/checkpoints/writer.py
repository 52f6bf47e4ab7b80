"""Writing one checkpoint: at every instant the folder holds the old state or the new one, whole.

    announce  every rank says what it will write; rank 0 looks at the space for all of it
    stage     .staging-step_000100-<pid>-<tag>/ is filled; each rank hashes its files on the way and
              flushes them, then every directory
    list      rank 0 writes the manifest of all files last, and flushes it
    publish   one rename to step_000100, and the folder is flushed
    verify    each rank reads its files back and compares; only then the save counts

A process killed before the rename leaves a staging directory, which no reader looks at and the
next save or opening removes. An earlier checkpoint of the same step is first moved aside; until
the new one is published, readers find it under that name (`layout.published`).

Each phase ends with an exchange in which the ranks tell their results or their errors
(`rank_exchange.collective_call`): what fails on one rank is raised by all, and rank 0 takes the staging
directory away. All ranks write into one directory, on a file system that they share.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_core.errors import CheckpointError, RftError, StorageError
from rft_dist.checkpoint_format.file_operations import (
    DISPLACE,
    PUBLISH,
    RESTORE,
    SPACE,
    VERIFY,
    create_directory,
    remove_tree,
    rename,
    sync_directory,
    write_file,
)
from rft_dist.checkpoint_format.layout import (
    MANIFEST,
    MODEL,
    STATE,
    is_component_name,
    replaced_name,
    staging_name,
    step_name,
)
from rft_dist.checkpoint_format.manifest import Manifest, ManifestFault, canonical_json, entry_from_json
from rft_dist.checkpoint_format.resharding import from_json, merged
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.checkpoints.quotas import tightest_quota
from rft_dist.checkpoints.rank_exchange import Exchange, collective_call
from rft_dist.checkpoints.rank_writer import RankParts, write_rank
from rft_dist.checkpoints.reader import Finding, inspect, inspect_files, quarantine, read_manifest
from rft_dist.checkpoints.save_plan import Plan
from rft_dist.checkpoints.storage_errors import free_bytes, refused_save, too_little_space

_SLACK_BYTES = 64 * 2**10  # manifest, directories, rounding to blocks


@dataclass(frozen=True, slots=True)
class Encoded:
    """A component's record as the bytes that will be written, so that it can change while it is written."""

    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """All that one checkpoint is made of, as one rank has it."""

    directory: Path
    run_id: str
    step: int
    parent_step: int | None
    sequence: int
    shards: Mapping[str, Sequence[Shard]]
    """This rank's blocks of every component that is tensors."""
    records: Mapping[str, Any]
    """JSON values, or what `encode_record` made of them; on rank 0."""
    components: tuple[str, ...]
    """Names of all components of all ranks, sorted."""
    model_writer: Callable[[Path], None] | None
    """Gets the path of an existing directory and fills it; on rank 0."""
    model_tensors: Mapping[str, Tensor] | None = None
    """Whole weights that this rank writes where the model writer does not."""
    metadata: Mapping[str, Any]
    model_bytes: int
    """Expected size of what `model_writer` writes, for the check of free space."""
    last_good: int | None
    """Step of the newest checkpoint so far, for messages."""
    exchange: Exchange

    @property
    def target(self) -> Path:
        """Path of the published directory."""
        return self.directory / step_name(self.step)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which makes and renames directories."""
        return self.exchange.rank == 0


def write_checkpoint(request: SaveRequest, plan: Plan) -> Manifest:
    """Write, publish and verify; returns on every rank when the checkpoint is on the disk and read back equal.

    Raises CheckpointError, before anything is written, for a record that is no JSON, a component
    name that is a path, or a step that another run saved here. Raises StorageError where the
    system refuses an operation or the disk gives back other bytes; what was staged is removed and
    the checkpoints that were there stay. What one rank raises, all raise.
    """
    encoded: dict[str, bytes] = {}
    need = _SLACK_BYTES + request.model_bytes + plan.num_tensor_bytes + (plan.num_model_bytes or 0)
    staging = request.directory / staging_name(request.step, request.run_id)

    def opened() -> str:
        # whatever may be refused comes before the first directory is made
        encoded.update(_encode_records(request))
        _refuse_foreign_target(request)
        total = need + sum(map(len, encoded.values()))
        with _refusals(request, total):
            _require_space(request, total)
            _open_staging(staging, plan)
        return staging.name

    def written() -> dict[str, Any]:
        parts = RankParts(request.shards, encoded, request.model_writer, request.model_tensors)
        with _refusals(request, need):
            return write_rank(staging, request.exchange.rank, plan, parts)

    try:
        staging = request.directory / _on_first(request, opened)
        answers = collective_call(request.exchange, written)
        manifest = _manifest(request, plan, answers)
        displaced = _on_first(request, lambda: _list_and_publish(request, staging, manifest, need))
        _verify(request, manifest, [_own_files(answer) for answer in answers], displaced)
    except RftError:
        if request.is_first:
            # by rank 0, which made it; collective_call has raised the error on all ranks
            _discard(staging)
        raise
    # only now: until the new one had verified, the displaced one was the last good checkpoint
    if request.is_first and displaced is not None:
        _discard(request.directory / displaced)
    return manifest


def _on_first(request: SaveRequest, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and return its result on every rank."""
    return collective_call(request.exchange, lambda: work() if request.is_first else None)[0]


@contextmanager
def _refusals(request: SaveRequest, need: int) -> Generator[None]:
    """Convert OSError inside the block into the StorageError of this save."""
    try:
        yield
    except OSError as error:
        raise refused_save(request.step, request.directory, need, error, request.last_good) from error


def restore_displaced(displaced: Path, target: Path) -> None:
    """Settle a checkpoint moved aside by a save that did not finish: the newer one if it verifies, else this one."""
    if os.path.lexists(target):
        # the kill came after publishing: the newer one counts only if its bytes are right
        _, problems = inspect(target)
        if not problems:
            remove_tree(displaced)
            sync_directory(target.parent)
            return
        # it stays where it is, so that the name is not free
        if any(problem.quarantined_to is None for problem in quarantine(target, problems)):
            return
    rename(RESTORE, displaced, target)


def encode_record(name: str, value: object, *, step: int, directory: Path) -> Encoded:
    """The bytes of a component's record. Raises CheckpointError for what JSON cannot hold."""
    try:
        return Encoded(canonical_json(value) + b"\n")
    except (TypeError, ValueError) as error:
        allowed = f"JSON values with text keys and finite numbers: {error}"
        raise _bad_component(name, allowed, step, directory) from error


def _encode_records(request: SaveRequest) -> dict[str, bytes]:
    def encoded(name: str, value: object) -> bytes:
        if isinstance(value, Encoded):
            return value.content
        return encode_record(name, value, step=request.step, directory=request.directory).content

    for name in request.components:
        if not is_component_name(name):
            allowed = "letters, digits, _ . - only, and no leading dot"
            raise _bad_component(name, allowed, request.step, request.directory)
    # only to refuse it in time: the manifest, which holds the metadata, is written last
    encoded("metadata", dict(request.metadata))
    return {name: encoded(name, request.records[name]) for name in sorted(request.records)}


def _bad_component(name: str, allowed: str, step: int, directory: Path) -> CheckpointError:
    return CheckpointError(
        code="checkpoint.bad_component",
        what=f"component {name!r} of step {step} cannot be written",
        where=str(directory / step_name(step)),
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
    quota = tightest_quota(request.directory)
    if free < need or (quota is not None and quota.left < need):
        raise too_little_space(request.step, request.directory, need, free, request.last_good, quota)


def _open_staging(staging: Path, plan: Plan) -> None:
    create_directory(staging)
    create_directory(staging / STATE)
    create_directory(staging / MODEL)
    for component in sorted(plan.components):
        if plan.is_sharded(component):
            create_directory(staging / STATE / component)


def _manifest(request: SaveRequest, plan: Plan, answers: Sequence[Mapping[str, Any]]) -> Manifest:
    """The same on every rank but for `created` and what only rank 0 knows; rank 0 writes its own."""
    sharded = [component for component in sorted(plan.components) if plan.is_sharded(component)]
    tables = {
        name: merged(name, [from_json(answer["tables"][name]) for answer in answers if name in answer["tables"]])
        for name in sharded
    }
    files = [entry_from_json(entry) for answer in answers for entry in answer["files"]]
    return Manifest(
        run_id=request.run_id,
        step=request.step,
        parent_step=request.parent_step,
        sequence=request.sequence,
        components=request.components,
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        metadata={"versions": _versions(), **request.metadata},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        sharded=tables,
    )


def _own_files(answer: Mapping[str, Any]) -> list[str]:
    return [entry["path"] for entry in answer["files"]]


def _list_and_publish(request: SaveRequest, staging: Path, manifest: Manifest, need: int) -> str | None:
    """Write the manifest and give the directory its name; the name of the checkpoint that was there before, if any."""
    with _refusals(request, need):
        _refuse_other_folders(request, staging, manifest)
        # the manifest last: a directory that has one is complete
        write_file(staging / MANIFEST, [manifest.to_bytes()])
        # the names inside are on the disk before the directory gets its own
        sync_directory(staging)
        # as late as possible: from here to the rename the step is found under its displaced name only
        displaced = _make_room(request)
        try:
            rename(PUBLISH, staging, request.target)
        except OSError:
            _give_back(request, displaced)
            raise
    return None if displaced is None else displaced.name


def _refuse_other_folders(request: SaveRequest, staging: Path, manifest: Manifest) -> None:
    """Every file that a rank says to have written is here, or the ranks do not share the file system."""
    if request.exchange.world_size == 1:
        return
    missing = [entry.path for entry in manifest.files if not (staging / entry.path).is_file()]
    if missing:
        raise StorageError(
            code="checkpoint.not_shared",
            what=f"{len(missing)} files that other ranks wrote are not in {staging} of rank 0, the first {missing[0]}",
            where=str(request.directory),
            why="all ranks write one checkpoint: its folder must be on a file system that all machines share",
            state="the step was not acknowledged; the checkpoints before it are untouched",
            do="--save_path with a directory that all machines share",
        )


def _verify(request: SaveRequest, manifest: Manifest, files: Sequence[list[str]], displaced: str | None) -> None:
    """Each rank reads back what it wrote; rank 0 the names too. What differs goes to quarantine."""

    def compared() -> list[str]:
        with _refusals(request, manifest.num_bytes), VERIFY:
            if request.is_first:
                _, problems = inspect(request.target, only=files[0])
            else:
                problems = inspect_files(request.target, manifest, files[request.exchange.rank])
        return [f"{problem.file} {problem.problem}" for problem in problems]

    faults = [problem for problems in collective_call(request.exchange, compared) for problem in problems]

    def settled() -> None:
        # first, because it frees the name for the checkpoint that was there before
        problems = quarantine(request.target, [Finding(request.target, "", problem) for problem in faults])
        if displaced is not None:
            with _refusals(request, manifest.num_bytes):
                _give_back(request, request.directory / displaced)
        raise _reads_back_differently(request, problems)

    if faults:
        _on_first(request, settled)


def _give_back(request: SaveRequest, displaced: Path | None) -> None:
    if displaced is not None and not os.path.lexists(request.target):
        rename(RESTORE, displaced, request.target)


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
