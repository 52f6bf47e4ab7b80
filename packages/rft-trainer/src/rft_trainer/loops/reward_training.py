"""Training of a reward model on pairs of responses: a step is one optimizer step on whole pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rft_core.fault_points import declare
from rft_trainer.batches.prompt_ledger import EntryState, LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.batches.units import Unit
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.evaluation.pair_evaluator import PairScoreEvaluator
from rft_trainer.loops.trainer import Trainer
from rft_trainer.loops.training_loop import Limits, StepSize, TrainingLoop
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.update.optimizer_step import Updater, scale_metrics

POINT_LOGGED = declare("rm.logged", "the row of a step is written, its checkpoint is not")


@dataclass(slots=True, kw_only=True)
class RewardModelLoop(TrainingLoop[Sequence[TrainingSample]]):
    """The loop of a reward model's training, with its collaborators as fields."""

    units: Sequence[Unit]
    """What is never divided, a pair each; the ledger counts in them."""
    updater: Updater
    evaluator: PairScoreEvaluator | None
    """None = no pairs are held out."""
    train_batch_size: int
    """Units of an optimizer step."""
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
        """The fault point of these runs."""
        return POINT_LOGGED

    def _stop_before_learning(self) -> bool:
        return False  # a step reads rows that are in memory: nothing is collected that takes time

    def _collect(self) -> tuple[list[LedgerEntry], Sequence[TrainingSample]]:
        entries = self.ledger.reserve(self.train_batch_size)
        # nothing is sampled or scored here, but the ledger accepts the states in this order alone
        for state in (EntryState.GENERATED, EntryState.SCORED):
            self.ledger.advance(entries, state)
        # by their turns: a mixture may draw a unit twice in a step, and both times it is one by itself
        named = [(f"{entry.epoch}:{entry.position}", self.units[entry.prompt_index]) for entry in entries]
        return entries, [replace(sample, unit=turn) for turn, unit in named for sample in unit]

    def _learn(self, data: Sequence[TrainingSample]) -> dict[str, object]:
        totals, update, batch = MetricTotals(), self.progress.updates, TrainingBatch.of(data)
        with self.timer.phase(Phase.TRAIN):
            self.trainer.accumulate(batch, totals)
            outcome = self.trainer.step()
            merged = totals.merged(self.collectives)
        self._count_refused("policy", outcome, [sample.sample_id for sample in data], "--learning_rate", update)
        return {
            **merged,
            "policy/gradient_norm": outcome.gradient_norm,
            "policy/learning_rate": outcome.learning_rate,
            "policy/micro_batches": outcome.num_micro_batches,
            "data/samples": len(data),
            "data/pairs": batch.counts.num_units,
            **scale_metrics("policy", [outcome]),
        }

    def _size(self, data: Sequence[TrainingSample]) -> StepSize:
        return StepSize(sum(sample.num_tokens for sample in data), len(data))

    def _evaluate(self, name: str, extra: Mapping[str, object]) -> float | None:
        """Evaluate on the held-out pairs, where there are any; return their loss."""
        measured: dict[str, object] = dict(extra)
        lists: dict[str, object] = {}
        loss: float | None = None
        with self.timer.phase(Phase.EVAL):
            if self.evaluator is not None:
                result = self.evaluator()
                loss = result.loss
                measured |= result.as_record()
                lists = {"calibration": result.bins()}
                if self.averages is not None and self.progress.step:  # they begin as the weights
                    with self.averages():
                        measured |= {
                            key.replace("eval/", "eval_ema/"): value
                            for key, value in self.evaluator().as_record().items()
                            if key in ("eval/loss", "eval/accuracy")
                        }
        self.reporter.evaluation(name, measured, self.progress, **lists)
        return loss
