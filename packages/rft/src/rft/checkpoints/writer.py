"""Checkpoint writer between the loops and the store on disk, and the checkpoint that a run continues from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rft.checkpoints.parts import CheckpointParts
from rft.hub.download import ASIDE
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import places, run_tag, step_name
from rft_dist.checkpoints.async_writer import BackgroundSaves
from rft_dist.checkpoints.rank_exchange import Exchange, StoreExchange
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.checkpoints.storage_errors import gib
from rft_dist.checkpoints.store import CheckpointInfo, CheckpointStore, Tensors
from rft_dist.collectives import SingleProcess
from rft_dist.settings import CheckpointSettings
from rft_trainer.data.prompts import HASH_SCHEME
from rft_trainer.runs.checkpointing import MODEL_ONLY, SaveSchedule
from rft_trainer.runs.directory import RunDirectory

GIGABYTE = 10**9
_LOG = logging.getLogger(__name__)


class StoreWriter:
    """Writes checkpoints through the store, with what identifies the run in every manifest.

    Every rank has one. What every rank holds is written by rank 0; of what is shared out each writes its own.
    """

    def __init__(
        self,
        open_store: Callable[[Exchange], CheckpointStore],
        metadata: Mapping[str, Any],
        collectives: Exchange | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """`open_store` is called at the first save: opening makes a folder, and a run that cannot start makes none."""
        self._open_store = open_store
        self._metadata = dict(metadata)
        self._collectives: Exchange = collectives or SingleProcess()
        self._in_background = in_background
        self._store: CheckpointStore | None = None
        self._saves: BackgroundSaves | None = None
        self._kept: int | None = None
        self._reported: CheckpointInfo | None = None

    def keep(self, step: int) -> None:
        """Keep the checkpoint of `step` from retention, from the next save on."""
        self._kept = step

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, object],
        records: Mapping[str, object],
        policy: CheckpointParts,
        metadata: Mapping[str, object],
    ) -> None:
        """Save one checkpoint; return once it is on disk and read back, or is being written from a copy."""
        parts: dict[str, Tensors] = {name: self._given(cast(Tensors, part)) for name, part in tensors.items()}
        more = self._metadata | dict(metadata)
        # may be an exchange of all ranks, so it comes before the two ways of saving part
        weights = policy.local_weights()
        if self._in_background:
            saves = self._opened_saves()
            if self._kept is not None:
                saves.wait()  # until the save before has ended, its thread reads what is protected
                self._protect()
            saves.begin(
                step,
                tensors=parts,
                records=records,
                snapshot=policy.snapshot,
                metadata=more,
                model_tensors=weights,
            )
            return
        self._store = self._store or self._open_store(self._collectives)
        self._protect()
        info = self._store.save(
            step,
            tensors=parts,
            records=records,
            model_writer=policy.directory_writer(),
            metadata=more,
            model_tensors=weights,
        )
        self._tell(info)

    @property
    def failed(self) -> bool:
        """True when a save in the background has failed."""
        return self._saves is not None and self._saves.failed

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of a save that failed."""
        if self._saves is not None:
            self._tell(self._saves.wait())

    def _tell(self, info: CheckpointInfo | None) -> None:
        """Say once, on the first rank, which older checkpoints were deleted after a save, why, and what stayed."""
        if info is None or info is self._reported or self._collectives.rank != 0:
            return
        self._reported = info
        if info.refused is not None:
            _LOG.warning(
                "%s; step %d is in %s in its place, where a resume finds it; to save in the run again: %s",
                info.refused.what,
                info.step,
                info.path,
                info.refused.do,
            )
        if info.removed:
            names = ", ".join(step_name(removal.step) for removal in info.removed)
            freed = gib(sum(removal.num_bytes for removal in info.removed))
            # the oldest ones go for one reason together
            _LOG.info("deleted %s (%s): %s freed", names, _setting(info.removed[0].reason), freed, extra=ASIDE)
        for problem in info.problems:
            _LOG.warning("%s; it is tried again after the next save", problem)

    def _protect(self) -> None:
        if self._store is not None and self._kept is not None:
            self._store.protect("best", self._kept)

    def _given(self, part: Tensors) -> Tensors:
        """Return this rank's share of a part; a part that every rank holds comes from rank 0 alone."""
        return part if self._collectives.rank == 0 or not isinstance(part, Mapping) else {}

    def _opened_saves(self) -> BackgroundSaves:
        """Return the background saves, made at the first call, on a channel that training does not use."""
        if self._saves is None:
            one = self._collectives.world_size == 1
            # beside training's channel: two threads would order its exchanges differently
            exchange = self._collectives if one else StoreExchange.beside(self._collectives)
            self._store = self._open_store(exchange)
            self._saves = BackgroundSaves(self._store)
        return self._saves


def _setting(reason: str) -> str:
    """Return a reason of the store, such as `keep_last = 3`, with the setting that a person knows."""
    name, _, limit = reason.partition(" = ")
    if name == "keep_bytes":
        return f"max_ckpt_mem = {int(limit) // GIGABYTE}"
    return f"max_ckpt_num = {limit}"


def make_writer(
    directory: RunDirectory,
    settings: CheckpointSettings,
    metadata: Mapping[str, Any],
    collectives: Exchange,
    restored: ResumePoint | None,
) -> StoreWriter:
    """Make the checkpoint writer that the settings select."""
    opened = partial(open_store, directory, settings, restored)
    return StoreWriter(opened, metadata, collectives, in_background=settings.async_save)


def open_store(
    directory: RunDirectory,
    settings: CheckpointSettings,
    restored: ResumePoint | None = None,
    exchange: Exchange | None = None,
) -> CheckpointStore:
    """The run's checkpoints, kept within the settings' limits.

    A run that continues in its own directory keeps the name that its checkpoints have, also where the
    directory was renamed: the order of saving and what is removed follow from the checkpoints of one name.
    """
    own = directory.checkpoints_directory
    continues = restored is not None and restored.checkpoint.path.parent.resolve() in {
        place.resolve() for place in places(own)
    }
    return CheckpointStore(
        own,
        keep_last=settings.max_ckpt_num,
        keep_bytes=settings.max_ckpt_mem * GIGABYTE,
        run_id=restored.checkpoint.manifest.run_id if restored and continues else directory.path.name,
        exchange=exchange,
        fallback=_fallback_folder(directory.path, settings.fallback_save_path),
    )


def _fallback_folder(run: Path, fallback: str) -> Path | None:
    """Return the folder of this run below `fallback_save_path`; None where none is set."""
    if not fallback:
        return None
    path = run.absolute()
    # with a hash of the place, since two runs of one name may have the same second directory
    return Path(fallback).expanduser().absolute() / f"{path.name}-{run_tag(str(path))}"


def save_schedule(settings: CheckpointSettings) -> SaveSchedule:
    """Return the schedule of saves: every so many steps, episodes and minutes."""
    return SaveSchedule(
        every_steps=max(settings.save_steps, 0),
        every_episodes=settings.save_interval,
        every_seconds=60.0 * settings.save_minutes,
    )


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint that a run continues from."""

    checkpoint: Checkpoint
    other_rows: str = ""
    """Hash of rows that were accepted, as many, in the place of those that the checkpoint was made with."""

    @property
    def step(self) -> int:
        """Training steps that are in it."""
        return self.checkpoint.step

    @property
    def model_directory(self) -> Path:
        """Directory of the checkpoint's weights and tokenizer."""
        return self.checkpoint.model_directory

    def records(self) -> dict[str, Any]:
        """Every JSON component by name."""
        names = [name for name in self.checkpoint.manifest.components if self.checkpoint.has_records(name)]
        records = {name: self.checkpoint.records(name) for name in names}
        if self.other_rows and "ledger" in records:
            records["ledger"] = {
                **records["ledger"],
                "data_hash": self.other_rows,
                "hash_scheme": HASH_SCHEME,
            }
        return records


def refuse_model_only(checkpoint: Checkpoint, new_run: str) -> None:
    """Raise `CheckpointError` for a checkpoint of the model alone; `new_run` is a command that begins with it."""
    if not checkpoint.manifest.metadata.get(MODEL_ONLY):
        return
    raise CheckpointError(
        code="checkpoint.model_only",
        what=f"step {checkpoint.step} was saved with save_model_only: it holds no state of the optimizer",
        where=str(checkpoint.path),
        why="a run goes on exactly with the whole state alone; a new run can begin with these weights",
        state="nothing was started and nothing was changed",
        do=new_run,
    )
