"""Between the loops' idea of saving and the store on disk: write one checkpoint, open one to continue from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.settings import CheckpointSettings
from rft_trainer.protocols import SavablePolicy
from rft_trainer.run_directory import RunDirectory
from rft_trainer.saving import SaveSchedule

GIGABYTE = 10**9


class StoreWriter:
    """Writes checkpoints through the store, with what identifies the run in every manifest."""

    def __init__(self, open_store: Callable[[], CheckpointStore], metadata: Mapping[str, Any]) -> None:
        """`open_store` is called at the first save: opening makes a folder, and a run that cannot start makes none."""
        self._open_store = open_store
        self._store: CheckpointStore | None = None
        self._metadata = dict(metadata)

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        records: Mapping[str, object],
        policy: SavablePolicy,
        metadata: Mapping[str, object],
    ) -> None:
        """Returns when the checkpoint is on disk and read back."""
        self._store = self._store or self._open_store()
        self._store.save(
            step,
            tensors=tensors,
            records=dict(records),
            model_writer=policy.save_pretrained,
            metadata=self._metadata | dict(metadata),
        )


class NoWriter:
    """What ranks other than the first write."""

    def save(self, step: int, **parts: object) -> None:
        """Nothing: every rank has the same state, and rank 0 writes it."""


def open_store(
    directory: RunDirectory, settings: CheckpointSettings, restored: Restored | None = None
) -> CheckpointStore:
    """The run's checkpoints, kept within the settings' limits.

    A run that continues in its own directory keeps the name that its checkpoints have, also where the
    directory was renamed: the order of saving and what is removed follow from the checkpoints of one name.
    """
    continues = restored is not None and restored.checkpoint.path.parent.resolve() == (
        directory.checkpoints_directory.resolve()
    )
    return CheckpointStore(
        directory.checkpoints_directory,
        keep_last=settings.max_ckpt_num,
        keep_bytes=settings.max_ckpt_mem * GIGABYTE,
        run_id=restored.checkpoint.manifest.run_id if restored and continues else directory.path.name,
    )


def save_schedule(settings: CheckpointSettings) -> SaveSchedule:
    """Every so many steps, episodes and minutes."""
    return SaveSchedule(
        every_steps=max(settings.save_steps, 0),
        every_episodes=settings.save_interval,
        every_seconds=60.0 * settings.save_minutes,
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """A verified checkpoint that a run continues from."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Training steps that are in it."""
        return self.checkpoint.step

    @property
    def model_directory(self) -> Path:
        """Where its weights and tokenizer are."""
        return self.checkpoint.model_directory

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state."""
        return self.checkpoint.tensors("optimizer")

    def records(self) -> dict[str, Any]:
        """Every JSON component by name."""
        names = [name for name in self.checkpoint.manifest.components if self.checkpoint.has_records(name)]
        return {name: self.checkpoint.records(name) for name in names}
