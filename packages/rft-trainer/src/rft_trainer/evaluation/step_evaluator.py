"""Evaluation of a step reward model on held-out rows: which steps it calls good, and where it sees the first error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rft_algos.losses.step_labels import step_cross_entropy
from rft_algos.statistics import CalibrationBin, calibration_curve, calibration_error, wilson_interval
from rft_trainer.batches.packing import assign_to_ranks, filler_batches, pack
from rft_trainer.batches.units import split_in_order
from rft_trainer.protocols import Collectives, StepScoringModel
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.update.step_loss import first_errors


@dataclass(frozen=True, slots=True)
class StepEvaluation:
    """Scores of the labelled steps of held-out rows beside their labels, row after row."""

    scores_N: Tensor
    """[N] float64, logits."""
    labels_N: Tensor
    rows_N: Tensor
    """[N] int64, the row of each step, counted from 0."""
    weights_N: Tensor

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a step, in nats."""
        losses_N = step_cross_entropy(self.scores_N, self.labels_N)
        return float((self.weights_N * losses_N).sum() / self.weights_N.sum())

    @property
    def decided_N(self) -> Tensor:
        """Bool: the label says more than that nobody knows."""
        return self.labels_N != 0.5

    @property
    def right_N(self) -> Tensor:
        """Bool: a decided step is called what it is labelled; a probability of 1/2 calls it bad."""
        return ((self.scores_N > 0) == (self.labels_N > 0.5)) & self.decided_N

    @property
    def majority(self) -> float:
        """Share of the commoner label: what a model is right in that calls every step the same."""
        good = float((self.labels_N[self.decided_N] > 0.5).double().mean())
        return max(good, 1 - good)

    def first_error(self) -> tuple[Tensor, Tensor]:
        """Return ([R] bool: the first step that is called bad is the first labelled so, [R] bool: the row has one)."""
        num_rows = int(self.rows_N[-1]) + 1
        labelled_R = first_errors(self.labels_N < 0.5, self.rows_N, num_rows)
        called_R = first_errors(self.scores_N <= 0, self.rows_N, num_rows)
        return labelled_R == called_R, labelled_R < len(self.labels_N)

    def calibration(self) -> list[CalibrationBin]:
        """Compare the probabilities of decided steps with how many of them are good; ten bins."""
        chosen_N = self.decided_N
        sure = self.scores_N.sigmoid()[chosen_N].clamp(0.0, 1.0)
        return calibration_curve(sure.tolist(), (self.labels_N > 0.5)[chosen_N].tolist(), low=0.0)

    def as_record(self) -> dict[str, object]:
        """Return the numbers by metric name; `eval/n` counts decided steps."""
        record: dict[str, object] = {"eval/loss": self.loss}
        if bool(self.decided_N.any()):
            record |= _share("eval/accuracy", self.right_N[self.decided_N])
            record["eval/n"] = int(self.decided_N.sum())
            record["eval/majority"] = self.majority
            record["eval/calibration_error"] = calibration_error(self.calibration())
        found_R, has_error_R = self.first_error()
        record |= _share("eval/first_error", found_R)
        if bool(has_error_R.any()) and not bool(has_error_R.all()):
            with_error, without = (float(found_R[chosen].double().mean()) for chosen in (has_error_R, ~has_error_R))
            record["eval/f1"] = 2 * with_error * without / (with_error + without) if with_error + without else 0.0
        return record

    def bins(self) -> list[dict[str, float]]:
        """Return the calibration curve as rows of a file."""
        return [asdict(one) for one in self.calibration()]


def _share(name: str, right_N: Tensor) -> dict[str, object]:
    """Return a share with the ends of its 95 % interval (Wilson)."""
    interval = wilson_interval(int(right_N.sum()), len(right_N))
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScoreEvaluator:
    """Evaluator of one step reward model on held-out rows, which are divided among the ranks."""

    model: StepScoringModel
    held_out: Sequence[TrainingSample]
    """One a row; the same on every rank."""
    collectives: Collectives
    """The ranks that rows are divided among."""
    max_sequences: int
    max_tokens: int
    """Tokens in a forward; 0 = no limit."""
    device: str = "cpu"
    collective_forward: bool = False
    """Every forward is a collective operation, so all ranks run equally many."""

    def __call__(self) -> StepEvaluation:
        """Score every row in evaluation mode; every rank gets all scores."""
        self.model.train(False)
        try:
            scores_N = self._scores()
        finally:
            self.model.train()
        labels = [
            (label, row, sample.weight)
            for row, sample in enumerate(self.held_out)
            for label, learned in zip(sample.returns, sample.loss_mask, strict=True)
            if learned
        ]
        labels_N, rows_N, weights_N = torch.tensor(labels, dtype=torch.float64).unbind(1)
        return StepEvaluation(scores_N, labels_N, rows_N.long(), weights_N)

    @torch.no_grad()
    def _scores(self) -> Tensor:
        """[N] float64: the scores of the steps of all rows, row after row."""
        ranks, lengths = self.collectives, [sample.num_tokens for sample in self.held_out]
        share = assign_to_ranks(lengths, ranks.world_size)[ranks.rank]
        counts = torch.tensor([sample.num_loss_tokens for sample in self.held_out])
        parts_R = list(torch.zeros(int(counts.sum()), dtype=torch.float64).split(counts.tolist()))
        for cut in self._cut([lengths[index] for index in share]):
            chosen = [share[number] for number in cut]
            batch = pack([self.held_out[index] for index in chosen], self.device)
            scores_N = self.model.step_scores(batch.tokens).detach().double().cpu()
            for index, scores in zip(chosen, scores_N.split(counts[chosen].tolist()), strict=True):
                parts_R[index] = scores
        if self.collective_forward:
            for batch in filler_batches(self.held_out, ranks, self._cut, self.device):
                self.model.step_scores(batch.tokens)
        # zeros where another rank has the row, so that the sum has the bits of the rank that scored it
        return ranks.sum(torch.cat(parts_R)) if ranks.world_size > 1 else torch.cat(parts_R)

    def _cut(self, num_tokens: Sequence[int]) -> list[list[int]]:
        return split_in_order(num_tokens, self.max_sequences, self.max_tokens)
