"""Checkpoint schedule and contents: every part that changes while training is in the checkpoint.

A save may be written while training goes on; what went wrong with it is raised at the next step
boundary, on all ranks, and before the run says that it has ended or was saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self, TypeVar

from torch import Tensor

from rft_core.errors import CheckpointError, PeerError, RftError, SavedAfterSignal
from rft_trainer.protocols import CheckpointWriter, Collectives, Optimizer, SavablePolicy
from rft_trainer.runs.stop_signals import StopSignals, agree
from rft_trainer.update.nonfinite_checks import refuse_non_finite_weights

PolicyT = TypeVar("PolicyT", bound=SavablePolicy)
_LOG = logging.getLogger(__name__)


class StatefulTensors(Protocol):
    """A part of the run that changes while training and is tensors by name.

    A part that is sharded over the ranks also has `shards()`, which returns this rank's shards.
    """

    def state_tensors(self) -> dict[str, Tensor]: ...


class Stateful(Protocol):
    """A part of the run that changes while training and is plain JSON.

    A part that is distributed over the ranks also has `gather()`, which all ranks call before rank 0 calls `state()`.
    """

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class Progress:
    """Progress of the run. `updates` counts optimizer steps and drives the learning-rate schedule."""

    step: int = 0
    updates: int = 0
    refused_in_a_row: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        """Return the counters as plain JSON."""
        return {
            "step": self.step,
            "updates": self.updates,
            "refused_in_a_row": self.refused_in_a_row,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counters that `state()` returned."""
        self.step = int(state["step"])
        self.updates = int(state["updates"])
        self.refused_in_a_row = int(state["refused_in_a_row"])
        self.tokens = int(state["tokens"])
        self.seconds = float(state["seconds"])


@dataclass(frozen=True, slots=True)
class SaveSchedule:
    """Intervals between saves in steps, episodes and seconds; 0 turns one off."""

    every_steps: int
    every_episodes: int
    every_seconds: float


class Saver:
    """Collector of the state of every registered part for the checkpoint writer, on every rank."""

    def __init__(
        self,
        writer: CheckpointWriter[PolicyT],
        policy: PolicyT,
        optimizer: Optimizer,
        parts: Mapping[str, Stateful],
        collectives: Collectives,
        *,
        schedule: SaveSchedule,
        before_save: Callable[[], None],
        tensor_parts: Mapping[str, StatefulTensors] | None = None,
        resume_command: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resume_command = resume_command
        self._writer: CheckpointWriter[Any] = writer
        self._policy: SavablePolicy = policy
        self._parts = parts
        self._tensor_parts = {"optimizer": optimizer, **(tensor_parts or {})}
        self._collectives = collectives
        self._schedule = schedule
        self._before_save = before_save
        self._clock = clock
        self._saved_at = clock()
        self.saved_step: int | None = None

    def due(self, step: int, *, ended_episode: int | None) -> bool:
        """Return whether to save after `step`; the time is rank 0's, so that ranks agree.

        Raises, on every rank, what went wrong with a save that was under way.
        """
        late = bool(self._schedule.every_seconds) and self._clock() - self._saved_at >= self._schedule.every_seconds
        late, failed = agree(self._collectives, late and self._collectives.rank == 0, self._writer.failed)
        if failed:  # on any rank: all of them raise, so that none is left waiting
            self._writer.wait()
        by_step = bool(self._schedule.every_steps) and step % self._schedule.every_steps == 0
        every = self._schedule.every_episodes
        by_episode = ended_episode is not None and bool(every) and ended_episode % every == 0
        return late or by_step or by_episode

    def save(self, step: int, *, episode: int) -> None:
        """Save unless this step is saved already; rows logged so far are on disk before the checkpoint is.

        Raises `NumericsError` on every rank where a weight is not finite.
        """
        if self.saved_step == step:
            return
        refuse_non_finite_weights(
            self._policy.named_parameters(),
            self._collectives,
            step=step,
            last_good=self.saved_step,
            do=self._resume_command,
        )
        is_first = self._collectives.rank == 0
        for part in self._parts.values():
            if gather := getattr(part, "gather", None):
                gather()
        if is_first:  # rows on disk first: a checkpoint must not be ahead of its run directory
            self._before_save()
        self._writer.save(
            step,
            tensors={name: _tensors_of(part) for name, part in self._tensor_parts.items()},
            records={name: part.state() for name, part in self._parts.items()} if is_first else {},
            policy=self._policy,
            metadata={"episode": episode},
        )
        self.saved_step = step
        self._saved_at = self._clock()

    def wait(self) -> None:
        """Wait until the last save is on the disk and verified; raise the error of a failed save."""
        self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait at the end of a run; a run that stops at once, or has lost a rank, does not."""
        del trace
        if kind is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt | PeerError):
            try:
                self.wait()
            except RftError as late:
                _LOG.error("besides, the last save failed: %s", late)

    def save_again(self, *, episode: int) -> None:
        """Save the restored step once more, so that it comes after every other checkpoint in the order of saving."""
        step, self.saved_step = self.saved_step, None
        assert step is not None, "nothing was restored"
        self.save(step, episode=episode)
        self.wait()

    def restore(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore every part from its saved state; a part without one, or a state without a part, is an error."""
        missing, unexpected = sorted(set(self._parts) - set(records)), sorted(set(records) - set(self._parts))
        if missing or unexpected:
            raise CheckpointError(
                code="checkpoint.components",
                what=f"step {step} lacks the parts {missing}, and holds {unexpected} that this run does not know",
                where=f"checkpoint of step {step}",
                why="a run continues exactly only when every part of it that changes is restored",
                do="resume with the version of the program that wrote it",
            )
        for name, part in self._parts.items():
            part.load_state(records[name])
        self.saved_step = step


def _tensors_of(part: StatefulTensors) -> object:
    """Return this rank's shards of a sharded part, all tensors of one that is not."""
    shards = getattr(part, "shards", None)
    return part.state_tensors() if shards is None else shards()


def save_and_stop(
    saver: Saver, signals: StopSignals, progress: Progress, *, episode: int, rank: int, resume_command: str
) -> NoReturn:
    """Save the last complete step and raise `SavedAfterSignal`; the prompts of an unfinished step are in no saved one.

    Args:
        saver: saves at `progress.step`, and is waited for.
        signals: the signal that was received here, if any.
        progress: steps that are complete.
        episode: episodes that are complete.
        rank: of this process.
        resume_command: continues the run.
    """
    saver.save(progress.step, episode=episode)
    saver.wait()
    raise SavedAfterSignal(
        code="run.stopped",
        what=f"{signals.received or 'a signal on another rank'} received; saved at step {progress.step}",
        where=f"rank {rank}",
        why="the run was asked to stop",
        state=f"nothing is lost: checkpoint of step {progress.step}",
        do=resume_command,
    )
