"""Training of a reward model on pairs, or on labelled steps: a step is one optimizer step on whole units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rft_core.fault_points import declare
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.batches.units import Unit
from rft_trainer.loops.supervised_loop import HeldOutResult, SupervisedLoop
from rft_trainer.records.rollouts import TrainingSample

POINT_LOGGED = declare("rm.logged", "the row of a step is written, its checkpoint is not")


class RewardEvaluation(Protocol):
    """Result of an evaluation of held-out rows."""

    @property
    def loss(self) -> float: ...
    def as_record(self) -> Mapping[str, object]: ...
    def bins(self) -> Sequence[Mapping[str, float]]:
        """Return the calibration curve."""
        ...


class RewardEvaluator(Protocol):
    """Evaluator of a reward model on held-out rows; every rank calls it."""

    def __call__(self) -> RewardEvaluation: ...


@dataclass(slots=True, kw_only=True)
class RewardModelLoop(SupervisedLoop[Sequence[TrainingSample]]):
    """The loop of a reward model's training, with its collaborators as fields; a step is so many units."""

    units: Sequence[Unit]
    """What is never divided, a pair each (or the steps of a response); the ledger counts in them."""
    evaluator: RewardEvaluator | None
    """None = no rows are held out."""

    @property
    def logged_point(self) -> str:
        """The fault point of these runs."""
        return POINT_LOGGED

    def _data(self, entries: Sequence[LedgerEntry]) -> Sequence[TrainingSample]:
        # by their turns: a mixture may draw a unit twice in a step, and both times it is one by itself
        named = [(f"{entry.epoch}:{entry.position}", self.units[entry.prompt_index]) for entry in entries]
        return [replace(sample, unit=turn) for turn, unit in named for sample in unit]

    def _samples(self, data: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        return data

    def _counts(self, data: Sequence[TrainingSample], batch: TrainingBatch) -> Mapping[str, object]:
        return {"data/samples": len(data), "data/pairs": batch.counts.num_units}

    def _measure(self) -> HeldOutResult | None:
        if self.evaluator is None:
            return None
        result = self.evaluator()
        return HeldOutResult(result.loss, result.as_record(), {"calibration": result.bins()})


@dataclass(slots=True, kw_only=True)
class StepRewardLoop(RewardModelLoop):
    """The loop of a step reward model's training; a unit is the labelled steps of a response."""

    def _counts(self, data: Sequence[TrainingSample], batch: TrainingBatch) -> Mapping[str, object]:
        return {"data/samples": len(data), "data/steps": batch.counts.num_loss_tokens}
