"""Checkpoint schedule and contents: every part that changes while training is in the checkpoint.

A save may be written while training goes on; what went wrong with it is raised at the next step
boundary, on all ranks, and before the run says that it has ended or was saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn, Protocol, Self, TypeVar

from torch import Tensor

from rft_core.errors import (
    AlarmError,
    CheckpointError,
    OutageError,
    PeerError,
    RftError,
    SavedAfterSignal,
    StorageError,
)
from rft_trainer.protocols import CheckpointWriter, Collectives, Optimizer, SavablePolicy
from rft_trainer.runs.stop_signals import AlarmStop, StopSignals, agree, in_force
from rft_trainer.update.nonfinite_checks import refuse_non_finite_weights
from rft_trainer.update.numeric_guard import NumericGuard

MODEL_ONLY = "model_only"
"""Key in a checkpoint's metadata that says that it holds no state to resume from."""
MOST_REFUSED_SAVES = 3
"""Saves that the system may refuse one after the other; the run ends with the last of them."""

PolicyT = TypeVar("PolicyT", bound=SavablePolicy)
_LOG = logging.getLogger(__name__)


class StatefulTensors(Protocol):
    """A part of the run that changes while training and is tensors."""

    def checkpoint_tensors(self) -> object:
        """Return what this rank saves, in a form that the checkpoint writer takes: all tensors by name, or shards."""
        ...


class Stateful(Protocol):
    """A part of the run that changes while training and is plain JSON."""

    def state(self) -> dict[str, Any]:
        """Return the state of all ranks; all of them call it, and what the first one gets is saved."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class Progress:
    """Progress of the run. `updates` counts optimizer steps and drives the learning-rate schedule.

    Refused steps in a row are counted for each model that is trained, since one may go on without the other; so are
    the guards of their steps.
    `rollbacks` are the steps that failed and made the run go back to a checkpoint.
    `owed_evaluation` is the name of an evaluation at this step that has begun and not ended; empty for none.
    `best_reward` is the highest held-out reward, or the lowest held-out loss with its sign changed, at `best_step`, in
    a run that keeps its checkpoint; else None.
    """

    step: int = 0
    updates: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    guards: dict[str, NumericGuard] = field(default_factory=dict[str, NumericGuard])
    rollbacks: list[int] = field(default_factory=list[int])
    tokens: int = 0
    seconds: float = 0.0
    owed_evaluation: str = ""
    best_reward: float | None = None
    best_step: int = 0

    def observe(self, reward: float) -> bool:
        """Take the held-out reward of this step; return whether it is the highest so far."""
        is_best = self.best_reward is None or reward > self.best_reward
        if is_best:
            self.best_reward, self.best_step = reward, self.step
        return is_best

    def passed(self, num_updates: int) -> Callable[[], float]:
        """Return a function to the share of so many updates that is done: 0 in the first one, 1 in the last one."""
        return lambda: min(1.0, self.updates / max(1, num_updates - 1))

    def state(self) -> dict[str, Any]:
        """Return the counters as plain JSON."""
        return {
            "step": self.step,
            "updates": self.updates,
            "refused": dict(self.refused),
            "guards": {part: guard.state() for part, guard in self.guards.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            # left out where there is none, so that the bytes of a save do not change
            **({"rollbacks": list(self.rollbacks)} if self.rollbacks else {}),
            **({"owed_evaluation": self.owed_evaluation} if self.owed_evaluation else {}),
            **({"best": [self.best_reward, self.best_step]} if self.best_reward is not None else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counters that `state()` returned."""
        self.step = int(state["step"])
        self.updates = int(state["updates"])
        self.refused = {part: int(number) for part, number in _refused(state).items()}
        # absent from checkpoints of runs without a guard
        for part, saved in state.get("guards", {}).items():
            if part in self.guards:
                self.guards[part].load_state(saved)
        self.rollbacks = [int(step) for step in state.get("rollbacks", [])]
        self.tokens = int(state["tokens"])
        self.seconds = float(state["seconds"])
        self.owed_evaluation = str(state.get("owed_evaluation", ""))
        if "best" in state:
            self.best_reward, self.best_step = float(state["best"][0]), int(state["best"][1])


def _refused(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the refused steps in a row of each model; older checkpoints name policy and critic in two counters."""
    if "refused" in state:
        return state["refused"]
    return {"policy": state["refused_in_a_row"], "critic": state.get("critic_refused_in_a_row", 0)}


@dataclass(frozen=True, slots=True)
class SaveSchedule:
    """Intervals between saves in steps, episodes and seconds; 0 turns one off."""

    every_steps: int
    every_episodes: int
    every_seconds: float


def _named(component: str, tensors: object) -> Iterator[tuple[str, Tensor]]:
    """Yield what a part saves as (component/name, tensor): tensors by name, or shards with a name and their data."""
    if isinstance(tensors, Mapping):
        yield from ((f"{component}/{name}", tensor) for name, tensor in tensors.items())
    elif isinstance(tensors, Sequence):
        shards = [shard for shard in tensors if isinstance(getattr(shard, "data", None), Tensor)]
        yield from ((f"{component}/{shard.name}", shard.data) for shard in shards)


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
        model_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resume_command = resume_command
        self._model_only = model_only
        self._writer: CheckpointWriter[Any] = writer
        self._policy: SavablePolicy = policy
        self._parts = parts
        # none where the model alone is saved: a resume from such a checkpoint is refused by its metadata
        self._tensor_parts: dict[str, StatefulTensors] = (
            {} if model_only else {"optimizer": optimizer, **(tensor_parts or {})}
        )
        self._collectives = collectives
        self._schedule = schedule
        self._before_save = before_save
        self._clock = clock
        self._saved_at = clock()
        self.saved_step: int | None = None
        self._on_disk: int | None = None
        self._refused = 0

    def keep(self, step: int) -> None:
        """Keep the checkpoint of a step, saved or about to be, from retention, in place of the one kept before."""
        self._writer.keep(step)

    def words(self, step: int) -> str:
        """Return what is said of a run that ends with the checkpoint of a step."""
        if self._model_only:
            return f"checkpoint of step {step} holds the model alone (save_model_only), which a new run can begin with"
        return f"nothing is lost: checkpoint of step {step}"

    def due(self, step: int, *, ended_episode: int | None) -> bool:
        """Return whether to save after `step`; the time is rank 0's, so that ranks agree.

        Takes note, on every rank, of a save under way that went wrong, and raises what cannot be tried again.
        """
        late = bool(self._schedule.every_seconds) and self._clock() - self._saved_at >= self._schedule.every_seconds
        # one exchange for both: the time is rank 0's, a failed save is known to the rank that wrote it
        late, failed = agree(self._collectives, late and self._collectives.rank == 0, self._writer.failed)
        if failed:  # on any rank: all of them settle it, so that none is left waiting
            self._settle()
        by_step = bool(self._schedule.every_steps) and step % self._schedule.every_steps == 0
        every = self._schedule.every_episodes
        by_episode = ended_episode is not None and bool(every) and ended_episode % every == 0
        return late or by_step or by_episode

    def save(self, step: int, *, episode: int, must: bool = False) -> None:
        """Save unless this step is saved already; rows logged so far are on disk before the checkpoint is.

        A save that the system refuses is tried again by the next one, so long as an earlier checkpoint is there and
        fewer than `MOST_REFUSED_SAVES` were refused in a row. `must`: no later one follows, or the caller relies on it.

        Raises `NumericsError` on every rank where a weight, a moment or an average is not finite on any, and
        `StorageError` for a refused save that is not to be tried again.
        """
        if self.saved_step == step:
            return
        tensors = {name: part.checkpoint_tensors() for name, part in self._tensor_parts.items()}
        # before anything is written, since retention may prune an older checkpoint that is good; moments, averages and
        # the critic too: a run that continues from them is as lost as one whose policy is not finite
        refuse_non_finite_weights(
            chain(self._policy.named_parameters(), *(_named(name, part) for name, part in tensors.items())),
            self._collectives,
            step=step,
            last_good=self.saved_step,
            do=self._resume_command,
        )
        is_first = self._collectives.rank == 0
        # on all ranks, also where only rank 0 writes: some parts gather their state with collectives
        records = {name: part.state() for name, part in self._parts.items()}
        if is_first:  # rows on disk first: a checkpoint must not be ahead of its run directory
            self._before_save()
        # before this one begins, so that a refusal of the save before is not taken for its own
        self._settle(must=must)
        try:
            self._writer.save(
                step,
                tensors=tensors,
                records=records if is_first else {},
                policy=self._policy,
                metadata={"episode": episode, **({MODEL_ONLY: True} if self._model_only else {})},
            )
        except StorageError as error:
            self._try_again_later(error, must=must)
        else:
            self.saved_step = step
        # from the end of the save, so that a long save does not make the next one due at once
        self._saved_at = self._clock()

    def wait(self) -> None:
        """Wait until the last save is on the disk and verified; raise the error of a failed save."""
        self._writer.wait()
        self._confirm()

    def _confirm(self) -> None:
        """Take note that all that was saved is on the disk."""
        if self.saved_step != self._on_disk and self.saved_step is not None:
            self._on_disk, self._refused = self.saved_step, 0

    def _settle(self, *, must: bool = False) -> None:
        """Wait for the save under way, if there is one; where the system refused it, leave it to the next one."""
        if self.saved_step == self._on_disk:
            return
        try:
            self.wait()
        except StorageError as error:
            # `must` is for the save that comes now: it is the next one, and answers this refusal
            self._try_again_later(error, must=False, last=must)

    def _try_again_later(self, error: StorageError, *, must: bool, last: bool = False) -> None:
        """Go on as of the last checkpoint that is there; raise the error where no save is to be tried after this one.

        Without any checkpoint the run ends: what would be lost by going on is all of it. `last`: another save is tried
        at once, whatever their number.
        """
        self.saved_step = self._on_disk
        self._refused += 1
        if must or self._on_disk is None or (self._refused >= MOST_REFUSED_SAVES and not last):
            raise error
        problem = error.problem
        _LOG.warning(
            "%s; training goes on, and the next save tries again (%d of %d refusals in a row that end the run): %s",
            problem.what,
            self._refused,
            MOST_REFUSED_SAVES,
            "; ".join(part for part in (problem.state, problem.do) if part),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait at the end of a run; a run that stops at once, or has lost a rank, does not."""
        del trace
        if kind is None:
            self.wait()
        # a second Ctrl-C asks to end at once, and with a lost rank a save of all ranks cannot be completed
        elif not isinstance(error, KeyboardInterrupt | PeerError):
            try:
                self.wait()
            except RftError as late:
                _LOG.error("the last save failed as well: %s", late)

    def save_again(self, *, episode: int) -> None:
        """Save the restored step once more, so that it comes after every other checkpoint in the order of saving."""
        # forgotten first, or `save` would take the step for saved
        step, self.saved_step = self.saved_step, None
        assert step is not None, "nothing was restored"
        self.save(step, episode=episode, must=True)
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
        # only after the check of all names, so that no part is restored alone
        for name, part in self._parts.items():
            part.load_state(records[name])
        self.saved_step = self._on_disk = step


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
    saver.save(progress.step, episode=episode, must=True)
    # before the claim below that nothing is lost: a save beside training is not on the disk yet
    saver.wait()
    raise SavedAfterSignal(
        code="run.stopped",
        what=f"{signals.received or 'a signal on another rank'} received; saved at step {progress.step}",
        where=f"rank {rank}",
        why="the run was asked to stop",
        state=saver.words(progress.step),
        do=resume_command,
    )


def end_by_alarm(saver: Saver, alarm: AlarmStop, progress: Progress, *, episode: int, resume_command: str) -> NoReturn:
    """Save the last complete step and raise, on every rank, what `--on_alarm` asks for.

    Raises:
        SavedAfterSignal: the run pauses, and asks to be started again.
        AlarmError: it stops, until somebody has looked at it.
    """
    saver.save(progress.step, episode=episode)
    # before the claim below that nothing is lost: a save beside training is not on the disk yet
    saver.wait()
    kind, code, asked = (SavedAfterSignal, "run.paused", "pause") if alarm.pauses else (AlarmError, "run.alarm", "stop")
    raise kind(
        code=code,
        what=f"alarm after step {progress.step}: {alarm.what}",
        where=f"metrics.jsonl, step {progress.step}",
        why=f"--on_alarm {asked}: a run that has an alarm of its health is saved and ends",
        state=saver.words(progress.step),
        do=f"{alarm.do}; {resume_command} goes on all the same, past this alarm",
    )


def save_in_outage(
    saver: Saver,
    outage: OutageError,
    progress: Progress,
    collectives: Collectives,
    *,
    episode: int,
    resume_command: str,
) -> NoReturn:
    """Save the last complete step after a service was away for too long, on all ranks, and raise `OutageError`.

    Where the wait was ended by a signal, it is an end by that signal, as of `save_and_stop`.
    """
    signals, rank = in_force(), collectives.rank
    if agree(collectives, signals.received is not None)[0]:
        save_and_stop(saver, signals, progress, episode=episode, rank=rank, resume_command=resume_command)
    saver.save(progress.step, episode=episode, must=True)
    # before the claim below that nothing is lost: a save beside training is not on the disk yet
    saver.wait()
    problem = outage.problem
    raise OutageError(
        code=problem.code,
        what=problem.what,
        where=problem.where,
        why=problem.why,
        state=saver.words(progress.step),
        do=f"when it is back: {resume_command}",
    ) from outage
