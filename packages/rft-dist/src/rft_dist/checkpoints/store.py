"""The folder of a run's checkpoints: save, find, open, list, and keep within limits.

With several ranks each has a store on the same folder and all call `save`; rank 0 makes, renames
and removes directories, the others write files into the one that it staged.

A store may have a second folder, on another file system, for saves that the first one refuses. What is
searched, listed and removed is then in both, in one order of saving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_core.checkpoint_places import add_place
from rft_core.errors import CheckpointError, Problem, StorageError
from rft_dist.checkpoint_format.file_operations import STAGE, sync_directory
from rft_dist.checkpoint_format.layout import MODEL, candidates, pin_path, places, published, step_name
from rft_dist.checkpoint_format.manifest import Manifest, ManifestFault
from rft_dist.checkpoint_format.shards import Shard, shards_of
from rft_dist.checkpoints.rank_exchange import Exchange, collective_call
from rft_dist.checkpoints.reader import (
    Checkpoint,
    Search,
    newest_verified,
    open_verified,
    read_manifest,
    require_equal_components,
)
from rft_dist.checkpoints.retention import (
    Removal,
    RetentionPolicy,
    Stored,
    plan_removals,
    remove_checkpoint,
    sweep,
)
from rft_dist.checkpoints.save_plan import Plan, RankShards, announce
from rft_dist.checkpoints.storage_errors import refused_opening, refused_save, refused_twice
from rft_dist.checkpoints.writer import SaveRequest, write_checkpoint
from rft_dist.collectives import SingleProcess

Tensors = Mapping[str, Tensor] | Sequence[Shard]
"""The tensors of a component: whole ones by name, or this rank's blocks."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint by its manifest; its other files were not looked at, except after a save."""

    step: int
    path: Path
    num_bytes: int
    """All files, the manifest included."""
    created: str
    components: tuple[str, ...]
    metadata: Mapping[str, Any]
    removed: tuple[Removal, ...] = ()
    """Older ones that retention removed after this save."""
    problems: tuple[str, ...] = ()
    """Removals that the system refused; the save itself is complete."""
    refused: Problem | None = None
    """Why the run's own folder refused this save, where it went to the second one."""


class CheckpointStore:
    """Checkpoints of one run in one folder.

    Example::

        store = CheckpointStore(run / "checkpoints", keep_last=3, keep_bytes=None, run_id="gsm8k-2026-01-01-fox")
        store.save(100, tensors={"optimizer": optimizer.state_tensors()}, records={"ledger": ledger},
                   model_writer=policy.save_pretrained, metadata={"config_sha256": digest})
        found = store.newest_verified()

    With `components`, a save of any other set of components is refused, and so is an opened
    checkpoint that holds another set. `keep_last` and `keep_bytes` are limits or None, over both folders
    together where there is a `fallback`: a folder of this run alone, as an absolute path. `exchange` connects
    the ranks of the run, which then all make a store at the same time; without it there is one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int | None,
        keep_bytes: int | None,
        run_id: str,
        components: Collection[str] | None = None,
        exchange: Exchange | None = None,
        fallback: Path | None = None,
    ) -> None:
        self.directory = directory
        self._fallback = fallback
        self.run_id = run_id
        self._exchange: Exchange = exchange or SingleProcess()
        self._policy = RetentionPolicy(keep_last, keep_bytes)
        self._components = None if components is None else frozenset(components)
        self._protected: dict[str, int] = {}
        self._parent_step: int | None = None
        # through the exchange: no rank goes on until rank 0 has settled what a kill left behind
        collective_call(self._exchange, self._open_folder)

    def _open_folder(self) -> None:
        if not self.is_first:
            return
        folders = [self.directory] if self._fallback is None else [self.directory, self._fallback]
        for folder in folders:
            try:
                _create_folder(folder)
                sweep(folder, self.run_id)
            except OSError as error:
                raise refused_opening(folder, error) from error
        if self._fallback is not None:
            # while there is space: on the full disk later on the name of the second folder might not fit
            add_place(self.directory, self._fallback)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which makes, renames and removes directories."""
        return self._exchange.rank == 0

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensors],
        records: Mapping[str, Any],
        model_writer: Callable[[Path], None],
        metadata: Mapping[str, Any],
        model_tensors: Mapping[str, Tensor] | None = None,
        model_bytes: int | None = None,
    ) -> CheckpointInfo:
        """Write step `step`; returns when it is on the disk, was read back, and old ones are removed.

        `tensors` and `records` (JSON values with text keys) map component names to their state; a
        component may have both. `model_writer` fills the directory that it is given. `model_bytes`
        is the size it will have, for the check of free space; by default that of the newest
        checkpoint. Raises StorageError or CheckpointError (`writer.write_checkpoint`); where there is a
        second folder, a StorageError is raised only when both have refused.

        With several ranks all call it, with the same step. Of each component a rank gives the
        blocks that it alone gives; `records` and `model_writer` are those of rank 0. Where ranks
        give `model_tensors`, each writes those whole weights to a file of its own, and the model
        writer adds configuration and tokenizer only.
        """
        shards = {name: shards_of(part) for name, part in tensors.items()}

        def save_in(folder: Path) -> CheckpointInfo:
            return self._save_in(folder, step, shards, records, model_writer, metadata, model_tensors, model_bytes)

        try:
            return save_in(self.directory)
        except StorageError as error:  # on all ranks, whichever was refused
            if self._fallback is None:
                raise
            refused = error
        try:
            return replace(save_in(self._fallback), refused=refused.problem)
        except StorageError as again:
            raise refused_twice(refused.problem, again.problem) from again

    def _save_in(
        self,
        folder: Path,
        step: int,
        shards: Mapping[str, Sequence[Shard]],
        records: Mapping[str, Any],
        model_writer: Callable[[Path], None],
        metadata: Mapping[str, Any],
        model_tensors: Mapping[str, Tensor] | None,
        model_bytes: int | None,
    ) -> CheckpointInfo:
        announced = announce(step, shards, model_tensors)
        is_first = self.is_first

        def opening_of() -> list[Any]:
            return [
                announced.to_json(),
                {**self._opening(folder, step), "records": sorted(records)} if is_first else {},
            ]

        answers = collective_call(self._exchange, opening_of)
        # all ranks take what rank 0 saw of the folder: each for itself might see another state of it
        plan, opening = Plan(tuple(RankShards.from_json(answer[0]) for answer in answers)), answers[0][1]
        _require_same_step(plan)
        components = plan.components | set(opening["records"])
        self._require_components(components, step)
        expected = opening["other_bytes"] if plan.num_model_bytes is not None else opening["model_bytes"]
        request = SaveRequest(
            directory=folder,
            run_id=self.run_id,
            step=step,
            parent_step=opening["parent_step"],
            sequence=opening["sequence"],
            shards=shards,
            records=records if is_first else {},
            components=tuple(sorted(components)),
            model_writer=model_writer if is_first else None,
            model_tensors=model_tensors,
            metadata=metadata,
            model_bytes=expected if model_bytes is None else model_bytes,
            last_good=opening["last_good"],
            exchange=self._exchange,
        )
        manifest = write_checkpoint(request, plan)
        self._parent_step = step
        # after the save has verified: before, the folder might lose its last good checkpoint
        pruned = collective_call(self._exchange, lambda: self._prune_on_first(step, request.target))[0]
        removed = tuple(Removal(*entry) for entry in pruned["removed"])
        return _info(request.target, manifest, removed, tuple(pruned["problems"]))

    def _require_components(self, components: Collection[str], step: int) -> None:
        if self._components is not None:
            require_equal_components(self._components, components, where=f"save of step {step}")

    def _opening(self, folder: Path, step: int) -> dict[str, Any]:
        """Return rank 0's view of all folders, after removing what killed processes left behind in this one."""
        newest = max(self._manifests().values(), key=lambda entry: entry.sequence, default=None)
        last_good = newest.step if newest else None
        try:
            sweep(folder, self.run_id)
        except OSError as error:
            raise refused_save(step, folder, 0, error, last_good) from error
        weights, others = _model_bytes(newest)
        return {
            "sequence": 1 + (newest.sequence if newest else 0),
            "parent_step": self._parent_step,
            "last_good": last_good,
            "model_bytes": weights + others,
            "other_bytes": others,
        }

    def newest_verified(self) -> Search:
        """The checkpoint of this run saved last that verifies, and findings about newer ones."""
        search = newest_verified(self.directory, run_id=self.run_id)
        if search.checkpoint is not None:
            self._resume_from(search.checkpoint)
        return search

    def open(self, step_or_path: int | Path) -> Checkpoint:
        """A checkpoint by step, or by the path of its directory; CheckpointError unless it verifies."""
        if isinstance(step_or_path, int):
            paths = published(self.directory)
            if step_or_path not in paths:
                raise _missing_step(self.directory, step_or_path)
            step_or_path = paths[step_or_path]
        checkpoint = open_verified(step_or_path)
        self._resume_from(checkpoint)
        return checkpoint

    def list(self) -> list[CheckpointInfo]:
        """This run's checkpoints by their manifests, in order of saving."""
        found = sorted(self._manifests().items(), key=lambda entry: (entry[1].sequence, entry[1].step))
        return [_info(path, manifest) for path, manifest in found]

    def protect(self, reason: str, step: int | None) -> None:
        """Keep `step` from retention for `reason` ("best", ...), in place of the step that had this reason.

        A file `step_000100.pin` beside the checkpoint does the same without a program.
        """
        if step is None:
            self._protected.pop(reason, None)
        else:
            self._protected[reason] = step

    def _resume_from(self, checkpoint: Checkpoint) -> None:
        if self._components is not None:
            checkpoint.require_components(self._components)
        self._parent_step = checkpoint.step
        # a source in another folder needs no protection: nothing is removed there
        if checkpoint.path.parent.resolve() in {place.resolve() for place in places(self.directory)}:
            self.protect("resume source", checkpoint.step)

    def _manifests(self) -> dict[Path, Manifest]:
        """Return this run's manifests by directory; unreadable ones are left to the search for the newest one."""
        # of a step with a displaced directory in the same folder, the published one comes later and takes its place
        paths = {(path.parent, step): path for step, path in candidates(self.directory)}
        manifests: dict[Path, Manifest] = {}
        for (_, step), path in paths.items():
            try:
                manifest = read_manifest(path)
            except (OSError, ManifestFault):
                continue
            if manifest.run_id == self.run_id and manifest.step == step:
                manifests[path] = manifest
        return manifests

    def _prune_on_first(self, step: int, saved: Path) -> dict[str, Any]:
        if not self.is_first:
            return {}
        removed, problems = self._prune(step, saved)
        return {"removed": [[each.step, each.num_bytes, each.reason] for each in removed], "problems": problems}

    def _prune(self, saved_step: int, saved: Path) -> tuple[list[Removal], list[str]]:
        manifests = self._manifests()
        problems: list[str] = []
        # an earlier save of the step in the other folder, which this one replaces
        for path in [path for path, entry in manifests.items() if entry.step == saved_step and path != saved]:
            del manifests[path]
            problems += self._remove(path, saved_step)
        stored = [Stored(entry.step, entry.sequence, _num_bytes(entry)) for entry in manifests.values()]
        protected = {step: reason for reason, step in self._protected.items()}
        by_step = {entry.step: path for path, entry in manifests.items()}
        for step, path in by_step.items():
            if pin_path(path.parent, step).exists():
                protected[step] = "pinned"
        removed: list[Removal] = []
        for removal in plan_removals(stored, self._policy, protected):
            # the save is complete: what stays is reported, and tried again after the next one
            refused = self._remove(by_step[removal.step], removal.step)
            problems += refused
            removed += [] if refused else [removal]
        return removed, problems

    def _remove(self, path: Path, step: int) -> list[str]:
        """Remove one checkpoint; return what the system says where it refuses."""
        try:
            remove_checkpoint(path.parent, step, self.run_id)
        except OSError as error:
            return [f"{step_name(step)} was not removed: {error.strerror or error}"]
        return []


def _create_folder(directory: Path) -> None:
    if directory.is_dir():
        return
    with STAGE:
        directory.mkdir(parents=True, exist_ok=True)
    sync_directory(directory.parent)


def _info(
    path: Path, manifest: Manifest, removed: tuple[Removal, ...] = (), problems: tuple[str, ...] = ()
) -> CheckpointInfo:
    return CheckpointInfo(
        step=manifest.step,
        path=path,
        num_bytes=_num_bytes(manifest),
        created=manifest.created,
        components=manifest.components,
        metadata=manifest.metadata,
        removed=removed,
        problems=problems,
    )


def _num_bytes(manifest: Manifest) -> int:
    return manifest.num_bytes + len(manifest.to_bytes())


def _model_bytes(newest: Manifest | None) -> tuple[int, int]:
    """Bytes of the model directory's weights, and of its other files."""
    files = () if newest is None else newest.files
    model = [entry for entry in files if entry.path.startswith(f"{MODEL}/")]
    weights = sum(entry.digest.size for entry in model if entry.path.endswith(".safetensors"))
    return weights, sum(entry.digest.size for entry in model) - weights


def _require_same_step(plan: Plan) -> None:
    steps = [each.step for each in plan.announced]
    if len(set(steps)) > 1:
        raise CheckpointError(
            code="checkpoint.other_step",
            what="ranks save different steps: " + ", ".join(f"rank {r} {step}" for r, step in enumerate(steps)),
            where="save of a checkpoint by all ranks",
            why="a checkpoint is the state of one step on every rank",
            state="nothing was written",
            do="report this: the ranks of this run are out of step",
        )


def _missing_step(directory: Path, step: int) -> CheckpointError:
    """The error for a step that is not in the folder."""
    return CheckpointError(
        code="checkpoint.no_such_step",
        what=f"no checkpoint of step {step} in {directory}; there are {sorted(published(directory)) or 'none'}",
        where=str(directory),
        why="a step is found by the name of its directory",
        do=f"ls {directory}",
    )
