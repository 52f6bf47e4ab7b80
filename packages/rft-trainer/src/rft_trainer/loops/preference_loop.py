"""Preference training: pairs or labelled responses, a reference that is asked once, a loss of whole responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rft_core.fault_points import declare
from rft_trainer.batches.prompt_ledger import EntryState, LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.evaluation.preferences import PreferenceResult
from rft_trainer.loops.trainer import Trainer
from rft_trainer.loops.training_loop import Limits, StepSize, TrainingLoop
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.preference_rows import PreferenceRows
from rft_trainer.update.optimizer_step import Updater, scale_metrics

POINT_LOGGED = declare("dpo.logged", "the row of a step is written, its checkpoint is not")


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step: their numbers, and their samples."""

    rows: Sequence[int]
    samples: Sequence[TrainingSample]


@dataclass(slots=True, kw_only=True)
class PreferenceLoop(TrainingLoop[StepRows]):
    """The loop of preference training, with its collaborators as fields."""

    rows: PreferenceRows
    updater: Updater
    evaluator: Callable[[], PreferenceResult] | None
    """None where no rows are held out."""
    prepare: Callable[[Sequence[int]], Mapping[str, float]] | None
    """Gives the objective what it needs of all rows of a step, before its first forward; returns metrics."""
    train_batch_size: int
    max_steps: int
    eval_every: int
    max_refused_in_a_row: int
    averages: SwapInEma | None = None
    """Swaps the moving averages of the weights in, to be evaluated too."""
    trainer: Trainer = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.updater, self.progress, self.collectives)

    def run(self, signals: StopSignals) -> None:
        """Train until the epochs, `max_steps` or patience end."""
        self.steps(signals)

    @property
    def limits(self) -> Limits:
        """Return how long the run goes on; without an interval every epoch ends with an evaluation."""
        return Limits(
            max_steps=self.max_steps,
            eval_every=self.eval_every,
            max_refused_in_a_row=self.max_refused_in_a_row,
            eval_each_epoch=True,
        )

    @property
    def logged_point(self) -> str:
        """The fault point of runs on preferences."""
        return POINT_LOGGED

    def begin(self) -> None:
        """Ask the reference for the log-probs of all rows, unless the run has them, then begin as every run."""
        with self.timer.phase(Phase.LOGPROB):
            self.rows.begin()
        TrainingLoop.begin(self)

    def _stop_before_learning(self) -> bool:
        return False  # a step reads rows that are in memory: nothing is collected that takes time

    def _collect(self) -> tuple[list[LedgerEntry], StepRows]:
        entries = self.ledger.reserve(self.train_batch_size)
        # nothing is sampled or scored here, but the ledger accepts the states in this order alone
        for state in (EntryState.GENERATED, EntryState.SCORED):
            self.ledger.advance(entries, state)
        rows = [entry.prompt_index for entry in entries]
        return entries, StepRows(rows, self.rows.of_step(rows))

    def _learn(self, data: StepRows) -> dict[str, object]:
        totals, update = MetricTotals(), self.progress.updates
        with self.timer.phase(Phase.LOGPROB):
            found = self.prepare(data.rows) if self.prepare is not None else {}
        with self.timer.phase(Phase.TRAIN):
            self.trainer.accumulate(TrainingBatch.of(data.samples), totals)
            outcome = self.trainer.step()
            merged = totals.merged(self.collectives)
        self._count_refused("policy", outcome, [sample.sample_id for sample in data.samples], "--learning_rate", update)
        return {
            **merged,
            **found,
            "policy/gradient_norm": outcome.gradient_norm,
            "policy/learning_rate": outcome.learning_rate,
            "policy/micro_batches": outcome.num_micro_batches,
            "data/samples": len(data.rows),
            **scale_metrics("policy", [outcome]),
        }

    def _size(self, data: StepRows) -> StepSize:
        return StepSize(sum(sample.num_tokens for sample in data.samples), len(data.samples))

    def _evaluate(self, name: str, extra: Mapping[str, object]) -> float | None:
        """Evaluate the held-out rows; return their loss, where there are any."""
        measured: dict[str, object] = dict(extra)
        lists: dict[str, object] = {}
        loss: float | None = None
        with self.timer.phase(Phase.EVAL):
            if self.evaluator is not None:
                result = self.evaluator()
                loss = result.loss
                measured |= result.as_record()
                lists = {"correct": result.correct}
                if self.averages is not None and self.progress.step:  # they begin as the weights
                    with self.averages():
                        averaged = self.evaluator()
                    measured |= {"eval_ema/loss": averaged.loss, "eval_ema/accuracy": averaged.accuracy}
        self.reporter.evaluation(name, measured, self.progress, **lists)
        return loss
