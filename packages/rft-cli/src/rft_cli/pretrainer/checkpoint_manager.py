"""The guide's `CheckpointManager`: model, optimizer, scheduler, scaler and random generators of a loop of one's own.

A checkpoint is a directory in the format of this project's runs: safetensors and JSON, a hash of every file, and a
manifest written last. A checkpoint that is named and cannot be used is an error, and never the start of another run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from rft_cli.pretrainer.configs import CheckpointConfig
from rft_cli.pretrainer.plain_state import joined, random_state, restore_random, split
from rft_core.errors import CheckpointError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.checkpoints.store import CheckpointStore

_RUN_ID = "pretrainer"
_WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and DDP put in front of the names of weights."""
_WEIGHTS, _STATE = "weights", "training"


class RestorablePart(Protocol):
    """An optimizer, a scheduler or a scaler."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


class CheckpointManager:
    """Saves and restores the state of a training loop.

    Example::

        manager = CheckpointManager(CheckpointConfig(checkpoint_dir="run", resume_from_checkpoint="auto"))
        epoch, best_loss = manager.load_checkpoint(model, optimizer, scheduler)
        manager.save_checkpoint(epoch, model, optimizer, scheduler, loss=loss)

    Rank 0 writes; on any other rank `save_checkpoint` does nothing, since DDP gives all the same state.
    """

    def __init__(self, config: CheckpointConfig, rank: int = 0, logger: logging.Logger | None = None) -> None:
        self.config = config
        self.rank = rank
        self.logger = logger or logging.getLogger(__name__)
        self.best_loss = math.inf
        self._best_step: int | None = None
        self.loaded_extra_state: dict[str, Any] | None = None
        self._store: CheckpointStore | None = None

    def save_checkpoint(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: RestorablePart,
        scheduler: RestorablePart | None = None,
        scaler: RestorablePart | None = None,
        loss: float = math.inf,
        extra_state: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Write the state after epoch `epoch`, counted from 0; returns its directory, or None where none is due.

        Raises:
            StorageError, CheckpointError: the file system refused it, or a state holds what is no number or text.
        """
        # a loss that is not a number is never the best
        is_best = self.config.save_best and loss < self.best_loss
        if self.rank != 0 or not (is_best or (epoch + 1) % self.config.save_interval == 0):
            return None
        self.best_loss = min(self.best_loss, loss) if is_best else self.best_loss
        self._best_step = epoch + 1 if is_best else self._best_step
        store = self._opened()
        store.protect("best", self._best_step)
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part is not None}
        state |= {"epoch": epoch, "loss": loss, "best_loss": self.best_loss, "best_step": self._best_step}
        state["extra_state"] = dict(extra_state or {})
        record, tensors = split(state | {"random": random_state()}, "state")
        saved = store.save(
            epoch + 1,
            tensors={_WEIGHTS: weights_of(model), _STATE: tensors},
            records={_STATE: record},
            model_writer=lambda directory: None,
            metadata={"epoch": epoch, "torch": torch.__version__},
        )
        self.logger.info("saved epoch %d in %s%s", epoch + 1, saved.path, " (the best)" if is_best else "")
        return saved.path

    def load_checkpoint(
        self,
        model: nn.Module,
        optimizer: RestorablePart,
        scheduler: RestorablePart | None = None,
        scaler: RestorablePart | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[int, float]:
        """Restore what `resume_from_checkpoint` names; returns the epoch to begin with, and the best loss so far.

        Raises:
            CheckpointError: there is none, it does not verify, or it is of another model; nothing is changed then.
        """
        named = self.config.resume_from_checkpoint
        if not named:
            return 0, math.inf
        path = Path(self.config.checkpoint_dir if named == "auto" else named).expanduser()
        found = resolve_checkpoint(path, asked_by="resume_from_checkpoint", origin="CheckpointConfig(...)")
        for finding in found.findings:
            self.logger.warning("not used: %s", finding)
        checkpoint = found.checkpoint
        state = joined(checkpoint.records(_STATE), checkpoint.tensors(_STATE, str(device)))
        load_weights(model, checkpoint, str(device))
        for name, part in (("optimizer", optimizer), ("scheduler", scheduler), ("scaler", scaler)):
            if part is not None and name in state:
                part.load_state_dict(state[name])
            elif part is not None:
                raise _without(checkpoint, name)
        self.best_loss, self._best_step = state["best_loss"], state["best_step"]
        self.loaded_extra_state = state["extra_state"]
        self._store = None
        restore_random(_on_cpu(state["random"]))  # last, since the lines above may draw
        self.logger.info("goes on after epoch %d of %s", state["epoch"] + 1, checkpoint.path)
        return state["epoch"] + 1, self.best_loss

    def _opened(self) -> CheckpointStore:
        if self._store is None:
            folder, keep = Path(self.config.checkpoint_dir).expanduser(), self.config.keep_last_n
            self._store = CheckpointStore(folder, keep_last=keep, keep_bytes=None, run_id=_RUN_ID)
        return self._store


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by the names that they have without torch.compile and DDP."""
    return {_own_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, checkpoint: Checkpoint, device: str = "cpu") -> None:
    """Put the weights of a checkpoint into a model, all of them.

    Raises:
        CheckpointError: other names or shapes; each difference is named, and nothing is changed.
    """
    stored, own = checkpoint.tensors(_WEIGHTS, device), weights_of(model)
    found = [f"{name} is missing in the checkpoint" for name in own.keys() - stored.keys()]
    found += [f"{name} is not in the model" for name in stored.keys() - own.keys()]
    found += [
        f"{name} has shape {tuple(stored[name].shape)} in the checkpoint and {tuple(own[name].shape)} now"
        for name in own.keys() & stored.keys()
        if own[name].shape != stored[name].shape
    ]
    if found:
        raise CheckpointError(
            code="checkpoint.other_model",
            what=f"{len(found)} weights differ: {'; '.join(sorted(found)[:6])}",
            where=str(checkpoint.path),
            why="a run goes on with the model that was saved",
            state="nothing was changed",
            do="build the model with the sizes that it was saved with",
        )
    names = {_own_name(name): name for name in model.state_dict()}
    model.load_state_dict({names[name]: value for name, value in stored.items()})


def _own_name(name: str) -> str:
    while True:
        shorter = name
        for wrapper in _WRAPPERS:
            shorter = shorter.removeprefix(wrapper)
        if shorter == name:
            return name
        name = shorter


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(part) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        parts = [_on_cpu(part) for part in cast("list[Any]", value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _without(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        code="pretrainer.no_state",
        what=f"checkpoint {checkpoint.path} has no state of a {name}",
        where=str(checkpoint.path),
        why="a resumed run continues exactly only with every part of its state",
        do=f"save it with a {name}, or load it without one",
    )
