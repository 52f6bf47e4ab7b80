"""Loss of a reward model on pairs of responses: a pair is one unit, and the mean is over all pairs of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rft_algos.losses.preference import bradley_terry, hps, log_exp, rao_kupper_tie
from rft_algos.losses.preference_variants import reward_centring
from rft_algos.objectives import LossOutput
from rft_trainer.batches.sequence_values import pair_values
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import ScoringModel
from rft_trainer.records.pairs import PairLabels, head_names
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.optimizer_step import MicroBatchOutput

LossType = Literal["sigmoid", "hps", "logexp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScoreObjective:
    """Loss of pairs from the scores of their responses, and its metrics.

    L = (1 / P) sum_p w_p sum_k l(s_better,pk, s_worse,pk) + c (s_1,pk + s_2,pk)^2, over the pairs p of the optimizer
    step and the heads k that have a label for them; l is `bradley_terry` with the pair's margin, `hps` or `log_exp`.
    With `tie_margin` eta it is the Rao-Kupper likelihood: eta is added to every margin, and pairs that were judged
    equal have the loss `rao_kupper_tie`.

    Metrics are (total, count) pairs:

        rm/loss        what is minimised: totals add up to it, counts to 1 over the pairs of the step
        rm/accuracy    share of decided pairs whose better response has the higher score (several heads: also by head)
        rm/margin      mean of s_better - s_worse over decided pairs
        rm/chosen      mean score of the better response, rm/rejected that of the worse
        rm/tied        share of the labels that are ties
    """

    heads: tuple[str, ...] = ("score",)
    loss_type: LossType = "sigmoid"
    tie_margin: float = 0.0
    """eta of the Rao-Kupper model; 0: there are no ties."""
    centring: float = 0.0
    """c, weight of the penalty that keeps scores around 0."""

    def losses(self, first_PK: Tensor, second_PK: Tensor, labels: PairLabels) -> Tensor:
        """Compute the weighted loss of each pair and head [P, K], without a denominator; 0 where there is no label."""
        better_PK, worse_PK = labels.better_first(first_PK, second_PK)
        better_B, worse_B = better_PK.flatten(), worse_PK.flatten()
        margins_B = labels.margins_P.to(better_B.dtype)[:, None].expand_as(better_PK).flatten() + self.tie_margin
        if self.loss_type == "sigmoid":
            loss_B = bradley_terry(better_B, worse_B, margins_B)
        else:
            loss_B = (hps if self.loss_type == "hps" else log_exp)(better_B, worse_B)
        if self.tie_margin:
            loss_B = torch.where(labels.tied_PK.flatten(), rao_kupper_tie(better_B, worse_B, self.tie_margin), loss_B)
        if self.centring:
            loss_B = loss_B + reward_centring(better_B, worse_B, coefficient=self.centring)
        labelled_PK = labels.decided_PK | labels.tied_PK
        loss_PK = loss_B.view_as(better_PK).where(labelled_PK, 0.0)
        return labels.weights_P.to(loss_PK.dtype)[:, None] * loss_PK

    def __call__(self, batch: TokenBatch, scores_SK: Tensor, counts: Counts) -> LossOutput:
        """Compute the loss of a micro-batch with the denominator of the whole optimizer step."""
        assert batch.sequence_numbers_SN is not None, "pairs carry their labels"
        labels = PairLabels.of(batch.sequence_numbers_SN[0::2])
        first_PK, second_PK = pair_values(scores_SK, batch)
        loss = self.losses(first_PK, second_PK, labels).sum() / counts.num_units
        share = torch.tensor(len(first_PK) / counts.num_units, dtype=torch.float64)
        metrics = {"rm/loss": (loss.detach().double(), share)}
        return LossOutput(loss, metrics | self._metrics(first_PK.detach(), second_PK.detach(), labels))

    def _metrics(self, first_PK: Tensor, second_PK: Tensor, labels: PairLabels) -> dict[str, tuple[Tensor, Tensor]]:
        better_PK, worse_PK = (scores_PK.double() for scores_PK in labels.better_first(first_PK, second_PK))
        decided_PK, tied_PK = labels.decided_PK, labels.tied_PK
        count = decided_PK.sum(dtype=torch.float64)

        def mean(values_PK: Tensor) -> tuple[Tensor, Tensor]:
            return values_PK.double().where(decided_PK, 0.0).sum(), count

        right_PK = (better_PK > worse_PK) & decided_PK
        metrics = {
            "rm/accuracy": mean(right_PK),
            "rm/margin": mean(better_PK - worse_PK),
            "rm/chosen": mean(better_PK),
            "rm/rejected": mean(worse_PK),
        }
        if self.tie_margin:
            metrics["rm/tied"] = (tied_PK.sum(dtype=torch.float64), count + tied_PK.sum(dtype=torch.float64))
        if len(self.heads) > 1:
            for column, name in enumerate(head_names(self.heads, "rm/accuracy")):
                metrics[name] = (right_PK[:, column].sum().double(), decided_PK[:, column].sum().double())
        return metrics


class PairLoss:
    """The micro-batch loss of a reward model; its outputs are the scores, each at all tokens of its sequence."""

    prepass = False

    def __init__(self, model: ScoringModel, objective: PairScoreObjective) -> None:
        self._model = model
        self._objective = objective

    @property
    def model(self) -> ScoringModel:
        """The reward model that is trained."""
        return self._model

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        """Do nothing: the loss of a pair needs no other."""

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the loss of a micro-batch, and its metrics."""
        scores_SK = self._model.score_matrix(batch.tokens)
        output = self._objective(batch, scores_SK, counts)
        totals.add(output.metrics)
        return MicroBatchOutput(output.loss, scores_SK.detach().sum(1)[batch.segment_ids_T])

    def filler(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the scores of a batch that does not count."""
        return self._model.score_matrix(batch.tokens).sum()

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Add nothing: every metric is a sum over micro-batches."""
