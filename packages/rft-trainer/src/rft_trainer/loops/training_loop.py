"""A run of training steps: what every kind of training does around the step that is its own.

    collect     the rows of the step, or the samples that are drawn for it
    learn       optimizer steps; the metrics of the step
    end         metrics row, evaluation, best weights, save: in this order, each before what depends on it
    stop        a signal is answered between two steps, on all ranks together

A step is atomic for checkpoints: it is either complete in the saved state or not in it at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from rft_core.fault_points import fault_point
from rft_trainer.batches.prompt_ledger import EntryState, Ledger, LedgerEntry
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.metrics.memory_growth import MemoryGrowth
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.protocols import BestWeights, Collectives
from rft_trainer.runs.checkpointing import Progress, Saver, end_by_alarm, save_and_stop
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import BY_PROGRAM, StopSignals, agree, agreed_alarm, in_force, stop_requested
from rft_trainer.update.nonfinite_checks import refuse_more_steps
from rft_trainer.update.optimizer_step import UpdateOutcome
from rft_trainer.update.weight_check import WeightCheck

DataT = TypeVar("DataT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run: when it ends, and how often it is evaluated."""

    max_steps: int
    """0 = the epochs alone end it."""
    eval_every: int
    """Steps between evaluations; 0 = only before and after."""
    max_refused_in_a_row: int
    eval_each_epoch: bool = False
    """Whether every epoch ends with an evaluation, where `eval_every` names no interval."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of what a training step went through, for the speed in its row."""

    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepDone(Generic[DataT]):
    """Result of one training step: what it was trained on, and its metrics by name."""

    data: DataT
    metrics: Mapping[str, object]


@dataclass(slots=True, kw_only=True)
class TrainingLoop(ABC, Generic[DataT]):
    """The steps of a run, with its collaborators as fields; `DataT` is what a step collects and learns from."""

    ledger: Ledger
    saver: Saver
    reporter: Reporter
    collectives: Collectives
    progress: Progress
    timer: PhaseTimer
    resume_command: str
    early_stop: EarlyStop | None = None
    """Ends the run on the loss of its evaluations."""
    best: BestWeights | None = None
    """With it the run ends with the weights of the lowest loss, and what it evaluates as "after" are these."""
    weight_check: WeightCheck | None = None
    """Compares the weights between ranks, with themselves between steps, and before and after the first update."""
    memory: MemoryGrowth = field(default_factory=MemoryGrowth, init=False)
    """Looks at the memory of this rank at the end of each step's updates."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Return how long the run goes on, and how often it is evaluated."""

    @property
    @abstractmethod
    def logged_point(self) -> str:
        """The fault point between the row of a step and its checkpoint."""

    @abstractmethod
    def _collect(self) -> tuple[list[LedgerEntry], DataT]:
        """Take the rows of the next step from the ledger, and what is trained on."""

    @abstractmethod
    def _learn(self, data: DataT) -> dict[str, object]:
        """Take the optimizer steps of one training step; return its metrics by name."""

    @abstractmethod
    def _evaluate(self, name: str, extra: Mapping[str, object]) -> float | None:
        """Evaluate the present weights, and report it with `extra`; return the loss that early stopping follows."""

    @abstractmethod
    def _size(self, data: DataT) -> StepSize:
        """Return what the step went through."""

    @abstractmethod
    def _stop_before_learning(self) -> bool:
        """Whether collecting takes so long that a signal is answered before the step is trained on."""

    def _report(self, data: DataT) -> None:
        """Report what a step collected, beside its metrics row."""

    def begin(self) -> None:
        """Evaluate and save before the first step; a resumed run has done so already, also one resumed from step 0."""
        if self.saver.saved_step is None:
            # asked to stop while the run was prepared, where a stop loses nothing: the evaluation waits for the resume
            if agree(self.collectives, stop_requested())[0]:
                self.progress.owed_evaluation = "before"
                self._save_and_stop(in_force())
            self._watch("before")
            self.saver.save(0, episode=0)
        elif self.progress.owed_evaluation:
            # the run ended in it, after the step was saved; saved again, so that it is owed no more
            self._watch(self.progress.owed_evaluation)
            self.progress.owed_evaluation = ""
            self.saver.save_again(episode=self.ledger.epoch)

    def steps(self, signals: StopSignals) -> None:
        """Take steps until nothing is left to train."""
        self.begin()
        while not self.finished:
            self.train_step(signals)

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to train."""
        stopped = self.early_stop is not None and self.early_stop.stopped
        at_limit = bool(self.limits.max_steps and self.progress.step >= self.limits.max_steps)
        return stopped or at_limit or self.ledger.finished

    def train_step(self, signals: StopSignals) -> StepDone[DataT]:
        """Run one step: collect, learn, write the metrics row, then evaluate and save where they are due."""
        entries, data = self._collect()
        # before any weight changes: these rows are in no saved step, so the ledger hands them out again
        if self._stop_before_learning() and agree(self.collectives, signals.received is not None)[0]:
            self._save_and_stop(signals)
        if self.weight_check is not None:
            self.weight_check.before(self.progress.step, self.saver.saved_step)
        guards = self.progress.guards.values()
        for guard in guards:
            guard.begin_step()
        record = self._learn(data)
        for guard in guards:
            record |= guard.metrics
        if self.weight_check is not None:
            self.weight_check.after(self.progress.step + 1, self.saver.saved_step)
        # only now: until here a checkpoint holds these rows as in flight, and a resume hands them out again
        self.ledger.advance(entries, EntryState.TRAINED)
        self.progress.step += 1
        ended = self.ledger.epoch if self.ledger.epoch > entries[-1].epoch else None
        self._end_step(record, data, ended)
        # a run that is finished saves by itself, and ends as complete rather than as stopped
        asked = signals.received is not None or signals.alarm is not None
        if not self.finished and agree(self.collectives, asked)[0]:
            self._save_and_stop(signals)
        return StepDone(data, record)

    def _end_step(self, record: dict[str, object], data: DataT, ended_episode: int | None) -> None:
        step, at_end = self.progress.step, self.finished
        size = self._size(data)
        # the row before the checkpoint: a resume cuts rows beyond its checkpoint, but cannot write one that is missing
        self.reporter.step(record, self.progress, self.timer, num_tokens=size.num_tokens, num_samples=size.num_samples)
        self._report(data)
        fault_point(self.logged_point)
        # before the save: a resume from it neither repeats this evaluation nor lacks it
        due = bool(self.limits.eval_every) and step % self.limits.eval_every == 0
        each_epoch = self.limits.eval_each_epoch and not self.limits.eval_every and ended_episode is not None
        if at_end or due or each_epoch:
            self._watch("after" if at_end and self.best is None else f"step {step}")
        # `at_end` is older than the evaluation, which may have ended the run by early stopping; at the planned end the
        # last weights are evaluated already, unless better ones are put back now
        if self.finished and not (at_end and self.best is None):
            self._conclude()
        # after `_conclude`, so that the last checkpoint holds the weights that the run ends with
        is_best = self.progress.best_reward is not None and self.progress.best_step == step
        if self.saver.due(step, ended_episode=ended_episode) or is_best or self.finished:
            with self.timer.phase(Phase.SAVE):
                self.saver.save(step, episode=self.ledger.epoch, must=self.finished)

    def _watch(self, name: str) -> None:
        """Evaluate, update early stopping with the loss, and keep the weights of the lowest loss."""
        loss = self._evaluate(name, {})
        if loss is None or self.early_stop is None:
            return
        self.early_stop.observe(loss, self.progress.step)
        # kept before the save of the same step, so that a resume finds the best weights in it
        if self.best is not None and self.early_stop.best_step == self.progress.step:
            self.best.keep()

    def _conclude(self) -> None:
        """Restore the best weights where they are kept, and run the final evaluation."""
        if self.best is None or self.early_stop is None:
            self._evaluate("after", {})
            return
        self.best.put_back()
        if self.weight_check is not None:
            self.weight_check.forget()
        self._evaluate("after", {"eval/best_step": self.early_stop.best_step})

    def _count_refused(
        self, part: str, outcome: UpdateOutcome, sample_ids: Sequence[str], flag: str, update: int
    ) -> None:
        """Count refused steps in a row of one model and raise `NumericsError` above the limit.

        Each model has a count of its own: the policy's good steps say nothing about the critic. `update` is the
        number of the update, from 0.
        """
        refused = self.progress.refused
        refused[part] = 0 if outcome.sound else refused.get(part, 0) + 1
        refuse_more_steps(
            refused[part],
            self.limits.max_refused_in_a_row,
            where=f"step {self.progress.step + 1}, update {update + 1}; samples " + ", ".join(sample_ids[:3]),
            saved_step=self.saver.saved_step,
            do=f"{self.resume_command} {flag} <a tenth of the present one>",
        )

    def _save_and_stop(self, signals: StopSignals) -> NoReturn:
        # a program asks on one rank, and every rank goes on with its script
        if agree(self.collectives, signals.received == BY_PROGRAM)[0]:
            signals.received = signals.received or BY_PROGRAM
        alarm = agreed_alarm(signals, self.collectives)
        if alarm is not None:
            end_by_alarm(
                self.saver, alarm, self.progress, episode=self.ledger.epoch, resume_command=self.resume_command
            )
        save_and_stop(
            self.saver,
            signals,
            self.progress,
            episode=self.ledger.epoch,
            rank=self.collectives.rank,
            resume_command=self.resume_command,
        )
