"""Loss of a step reward model: every labelled step counts, and the mean is over all of them in the step of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.losses.step_labels import step_cross_entropy
from rft_algos.objectives import LossOutput
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import StepScoringModel
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.optimizer_step import MicroBatchOutput
from rft_trainer.update.supervised_loss import denominator


def first_errors(bad_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
    """Return [R] int64: the index in the batch of the first bad step of each row; N where a row has none.

    Args:
        bad_N: [N] bool, a step each.
        rows_N: [N] int64, the row of each step.
        num_rows: R.
    """
    index_N = torch.arange(len(bad_N), device=bad_N.device)
    nowhere_R = index_N.new_full((num_rows,), len(bad_N))
    return nowhere_R.scatter_reduce(0, rows_N, index_N.where(bad_N, len(bad_N)), "amin")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScoreObjective:
    """Loss of labelled steps from their scores, and its metrics.

    L = sum_j w_j l(s_j, y_j) / sum_j w_j over the labelled steps j of the optimizer step, l = `step_cross_entropy` and
    w the weight of the step's row. Samples mark a step's last token in `loss_mask`, and have its label in `returns`.

    Metrics are (total, count) pairs; a step is called good where sigmoid(s) > 1/2:

        rm/loss          what is minimised: totals add up to it, counts to 1 over the labelled steps
        rm/accuracy      share of steps that are called what they are labelled; labels of 1/2 do not count
        rm/first_error   share of rows whose first step that is called bad is the first labelled so, or that have
                         neither
        rm/step_score    mean of sigmoid(s), rm/step_label mean of the labels
    """

    whole_rows: bool = True
    """Whether all labelled steps of a row are learned; one step alone has no first error to find."""

    def __call__(self, batch: TokenBatch, scores_N: Tensor, counts: Counts) -> LossOutput:
        """Compute the loss of a micro-batch with the denominator of the whole optimizer step."""
        assert batch.returns_T is not None, "steps carry their labels"
        ends_T = batch.loss_mask_T
        labels_N = batch.returns_T[ends_T].to(scores_N.dtype)
        weights_T = batch.row_weights_T
        weights_N = torch.ones_like(labels_N) if weights_T is None else weights_T[ends_T].to(scores_N.dtype)
        total = denominator(counts)
        loss = (weights_N * step_cross_entropy(scores_N, labels_N)).sum() / total
        share = weights_N.sum(dtype=torch.float64) / total
        metrics = {"rm/loss": (loss.detach().double(), share)}
        rows_N = batch.segment_ids_T[ends_T]
        return LossOutput(loss, metrics | self._metrics(scores_N.detach().double(), labels_N.double(), rows_N))

    def _metrics(self, scores_N: Tensor, labels_N: Tensor, rows_N: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        decided_N, count = labels_N != 0.5, scores_N.new_tensor(len(scores_N))
        right_N = ((scores_N > 0) == (labels_N > 0.5)) & decided_N
        metrics = {
            "rm/accuracy": (right_N.sum(dtype=torch.float64), decided_N.sum(dtype=torch.float64)),
            "rm/step_score": (scores_N.sigmoid().sum(), count),
            "rm/step_label": (labels_N.sum(), count),
        }
        if self.whole_rows:
            num_rows = int(rows_N[-1]) + 1
            called = first_errors(scores_N <= 0, rows_N, num_rows)
            found_R = called == first_errors(labels_N < 0.5, rows_N, num_rows)
            metrics["rm/first_error"] = (found_R.sum(dtype=torch.float64), scores_N.new_tensor(num_rows))
        return metrics


class StepLoss:
    """The micro-batch loss of a step reward model; its outputs are the scores, each at the token that ends its step."""

    prepass = False

    def __init__(self, model: StepScoringModel, objective: StepScoreObjective) -> None:
        self._model = model
        self._objective = objective

    @property
    def model(self) -> StepScoringModel:
        """The reward model that is trained."""
        return self._model

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        """Do nothing: the loss of a step needs no other."""

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the loss of a micro-batch, and its metrics."""
        scores_N = self._model.step_scores(batch.tokens)
        output = self._objective(batch, scores_N, counts)
        totals.add(output.metrics)
        outputs_T = scores_N.new_zeros(len(batch.loss_mask_T)).masked_scatter(batch.loss_mask_T, scores_N.detach())
        return MicroBatchOutput(output.loss, outputs_T)

    def filler(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the scores of a batch that does not count."""
        return self._model.step_scores(batch.tokens).sum()

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Add nothing: every metric is a sum over micro-batches."""
