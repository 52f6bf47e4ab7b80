"""Checkpoints of a loop of one's own: the state of policy, optimizer and counters, below a directory of choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rft.checkpoints.parts import CheckpointParts
from rft.checkpoints.writer import GIGABYTE, ResumePoint, StoreWriter
from rft.process.machine import Machine
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import step_name
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.rank_exchange import Exchange
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.settings import CheckpointSettings
from rft_trainer.protocols import Optimizer
from rft_trainer.runs.checkpointing import Saver, SaveSchedule, Stateful

_BY_HAND = SaveSchedule(0, 0, 0.0)


class LoopCheckpoints:
    """Writes the checkpoints of a loop; every directory that it is given has a history of its own."""

    def __init__(
        self,
        weights: CheckpointParts,
        optimizer: Optimizer,
        parts: dict[str, Stateful],
        machine: Machine,
        settings: CheckpointSettings,
    ) -> None:
        """Store what a checkpoint consists of; `settings` says how many are kept."""
        self._machine, self._settings = machine, settings
        self._make: Callable[[StoreWriter], Saver] = lambda writer: Saver(
            writer,
            weights,
            optimizer,
            parts,
            machine.collectives,
            schedule=_BY_HAND,
            before_save=lambda: None,
            resume_command="rft.open_loop(..., checkpoint=DIRECTORY)",
        )
        self._savers: dict[Path, Saver] = {}

    def save(self, directory: Path, updates: int) -> Path:
        """Write the checkpoint of so many updates below `directory`; return its path once it is verified on disk.

        Ranks write together, below the directory that rank 0 names: a temporary one differs between them.
        """
        named = str(directory.absolute()).encode() if self._machine.is_first else None
        target = Path(self._machine.collectives.broadcast_bytes(named).decode())
        if target not in self._savers:
            writer = StoreWriter(
                partial(self._open_store, target), {"command": "custom_loop"}, self._machine.collectives
            )
            self._savers[target] = self._make(writer)
        saver = self._savers[target]
        # the caller is told that it is there
        saver.save(updates, episode=0, must=True)
        saver.wait()
        return target / step_name(updates)

    def restore(self, restored: ResumePoint) -> None:
        """Give the parts the state of a checkpoint."""
        writer = StoreWriter(partial(self._open_store, restored.checkpoint.path.parent), {}, self._machine.collectives)
        self._make(writer).restore(restored.step, restored.records())

    def _open_store(self, directory: Path, exchange: Exchange) -> CheckpointStore:
        return CheckpointStore(
            directory,
            keep_last=self._settings.max_ckpt_num,
            keep_bytes=self._settings.max_ckpt_mem * GIGABYTE,
            run_id=directory.name,
            exchange=exchange,
        )


def find_checkpoint(path: str | Path | None, machine: Machine) -> ResumePoint | None:
    """Return the newest verified checkpoint at `path`, the same on every rank; None where no path is given.

    Raises:
        CheckpointError: there is none, it does not verify, or it is one of a run.
    """
    if path is None:
        return None
    asked: dict[str, Any] = {"asked_by": "checkpoint", "origin": "rft.open_loop"}
    if machine.is_first:
        found = resolve_checkpoint(Path(path).expanduser(), **asked).checkpoint
        # rank 0 alone may move damaged checkpoints, so the others open the one it chose
        machine.collectives.broadcast_bytes(str(found.path).encode())
    else:
        chosen = machine.collectives.broadcast_bytes(None).decode()
        found = resolve_checkpoint(Path(chosen), **asked).checkpoint
    if found.manifest.metadata.get("command") != "custom_loop":
        raise _of_a_run(found.path)
    return ResumePoint(found)


def _of_a_run(path: Path) -> CheckpointError:
    return CheckpointError(
        code="loop.checkpoint_of_run",
        what=f"{path} is a checkpoint of a run and not of a loop of one's own",
        where="checkpoint",
        why="a run has a ledger of its prompts, which a loop of one's own would not go on with",
        do=f"rft.open_loop({str(path / 'model')!r}) starts from its weights",
    )
