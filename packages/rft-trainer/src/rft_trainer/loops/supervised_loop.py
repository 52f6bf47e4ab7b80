"""Training on rows that are in memory: what demonstrations, preferences and pairs of a reward model have in common.

collect     the ledger's next rows
learn       one optimizer step on all of them, with the denominators of the whole step
evaluate    the held-out rows, and once more under the moving averages of the weights
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rft_trainer.batches.prompt_ledger import EntryState, LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.loops.trainer import Trainer
from rft_trainer.loops.training_loop import DataT, Limits, StepSize, TrainingLoop
from rft_trainer.loops.update_metrics import update_metrics
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.update.optimizer_step import Updater

_AVERAGED = ("loss", "accuracy")
"""Of an evaluation under the moving averages."""


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """Result of one evaluation of the held-out rows."""

    loss: float
    """Followed by early stopping."""
    metrics: Mapping[str, object]
    lists: Mapping[str, object] = field(default_factory=dict[str, object])
    """What is reported a row, or a part of them."""


@dataclass(slots=True, kw_only=True)
class SupervisedLoop(TrainingLoop[DataT]):
    """The loop of training on rows, with its collaborators as fields; `DataT` is what a step learns from."""

    updater: Updater
    train_batch_size: int
    """Entries of the ledger in an optimizer step."""
    max_steps: int
    eval_every: int
    """Steps between evaluations; 0 = only before and after, -1 = at the end of every epoch, too."""
    max_refused_in_a_row: int
    averages: SwapInEma | None = None
    """Swaps the moving averages of the weights in, to be evaluated too."""
    keeps_best: bool = False
    """Whether the checkpoint of the lowest held-out loss is saved, and kept from retention."""
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.updater, self.progress, self.collectives)

    @abstractmethod
    def _data(self, entries: Sequence[LedgerEntry]) -> DataT:
        """Return what the entries of a step stand for."""

    @abstractmethod
    def _samples(self, data: DataT) -> Sequence[TrainingSample]:
        """Return the samples of a step."""

    @abstractmethod
    def _measure(self) -> HeldOutResult | None:
        """Evaluate the held-out rows under the present weights; None where there are none."""

    def _prepare(self, data: DataT) -> Mapping[str, object]:
        """Compute what the loss needs of all rows of a step before its first forward; return metrics."""
        del data
        return {}

    def _counts(self, data: DataT, batch: TrainingBatch) -> Mapping[str, object]:
        """Return the sizes of a step for its metrics row."""
        del batch
        return {"data/samples": len(self._samples(data))}

    def run(self, signals: StopSignals) -> None:
        """Train until the epochs, `max_steps` or patience end."""
        self.steps(signals)

    @property
    def limits(self) -> Limits:
        """Return how long the run goes on, and when it is evaluated."""
        return Limits(
            max_steps=self.max_steps,
            eval_every=max(self.eval_every, 0),
            max_refused_in_a_row=self.max_refused_in_a_row,
            eval_each_epoch=self.eval_every < 0,
        )

    def _stop_before_learning(self) -> bool:
        return False  # a step reads rows that are in memory: nothing is collected that takes time

    def _collect(self) -> tuple[list[LedgerEntry], DataT]:
        entries = self.ledger.reserve(self.train_batch_size)
        # nothing is sampled or scored here, but the ledger accepts the states in this order alone
        for state in (EntryState.GENERATED, EntryState.SCORED):
            self.ledger.advance(entries, state)
        with self.timer.phase(Phase.DATA):
            return entries, self._data(entries)

    def _learn(self, data: DataT) -> dict[str, object]:
        samples = self._samples(data)
        totals, update, batch = MetricTotals(), self.progress.updates, TrainingBatch.of(samples)
        found = self._prepare(data)
        with self.timer.phase(Phase.TRAIN):
            self.trainer.accumulate(batch, totals)
            outcome = self.trainer.step()
            merged = totals.merged(self.collectives, worked=self.timer.worked(), memory=self.memory.take())
        self.updater.see(merged)
        self._count_refused("policy", outcome, [sample.sample_id for sample in samples], "--learning_rate", update)
        return {
            **merged,
            **found,
            **update_metrics("policy", [outcome]),
            **self._counts(data, batch),
        }

    def _size(self, data: DataT) -> StepSize:
        samples = self._samples(data)
        return StepSize(sum(sample.num_tokens for sample in samples), len(samples))

    def _evaluate(self, name: str, extra: Mapping[str, object]) -> float | None:
        """Evaluate the held-out rows; return their loss, where there are any."""
        measured: dict[str, object] = dict(extra)
        with self.timer.phase(Phase.EVAL):
            result = self._measure()
            if result is not None:
                # kept before the save of the same step; a loss that is no number is never the best
                if self.keeps_best and math.isfinite(result.loss) and self.progress.observe(-result.loss):
                    self.saver.keep(self.progress.step)
                measured |= result.metrics
                if self.averages is not None and self.progress.step:  # they begin as the weights
                    measured |= self._measure_averages(self.averages)
        self.reporter.evaluation(name, measured, self.progress, **(result.lists if result else {}))
        return result.loss if result else None

    def _measure_averages(self, averages: SwapInEma) -> dict[str, object]:
        with averages():
            result = self._measure()
        metrics = result.metrics if result else {}
        return {f"eval_ema/{name}": metrics[f"eval/{name}"] for name in _AVERAGED if f"eval/{name}" in metrics}
