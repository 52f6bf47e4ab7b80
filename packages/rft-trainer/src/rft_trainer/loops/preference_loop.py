"""Preference training: pairs or labelled responses, a reference that is asked once, a loss of whole responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rft_core.fault_points import declare
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.evaluation.preferences import PreferenceResult
from rft_trainer.loops.supervised_loop import HeldOutResult, SupervisedLoop
from rft_trainer.loops.training_loop import TrainingLoop
from rft_trainer.metrics.phase_timer import Phase
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.preference_rows import PreferenceRows

POINT_LOGGED = declare("dpo.logged", "the row of a step is written, its checkpoint is not")


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step: their numbers, and their samples."""

    rows: Sequence[int]
    samples: Sequence[TrainingSample]


@dataclass(slots=True, kw_only=True)
class PreferenceLoop(SupervisedLoop[StepRows]):
    """The loop of preference training, with its collaborators as fields."""

    rows: PreferenceRows
    evaluator: Callable[[], PreferenceResult] | None
    """None where no rows are held out."""
    prepare: Callable[[Sequence[int]], Mapping[str, float]] | None
    """Gives the objective what it needs of all rows of a step, before its first forward; returns metrics."""

    @property
    def logged_point(self) -> str:
        """The fault point of runs on preferences."""
        return POINT_LOGGED

    def begin(self) -> None:
        """Ask the reference for the log-probs of all rows, unless the run has them, then begin as every run."""
        with self.timer.phase(Phase.LOGPROB):
            self.rows.begin()
        TrainingLoop.begin(self)

    def _data(self, entries: Sequence[LedgerEntry]) -> StepRows:
        rows = [entry.prompt_index for entry in entries]
        return StepRows(rows, self.rows.of_step(rows))

    def _samples(self, data: StepRows) -> Sequence[TrainingSample]:
        return data.samples

    def _prepare(self, data: StepRows) -> Mapping[str, object]:
        with self.timer.phase(Phase.LOGPROB):
            return self.prepare(data.rows) if self.prepare is not None else {}

    def _counts(self, data: StepRows, batch: TrainingBatch) -> Mapping[str, object]:
        del batch
        return {"data/samples": len(data.rows)}

    def _measure(self) -> HeldOutResult | None:
        if self.evaluator is None:
            return None
        result = self.evaluator()
        return HeldOutResult(result.loss, result.as_record(), {"correct": result.correct})
