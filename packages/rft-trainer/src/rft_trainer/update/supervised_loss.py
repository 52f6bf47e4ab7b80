"""Loss of a policy on demonstrations where it has terms over the whole vocabulary: label smoothing, z-loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.objectives import LossOutput, VocabularyTerms, supervised_loss
from rft_core.packed_tokens import PackedTokens
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.optimizer_step import MicroBatchOutput


def denominator(counts: Counts) -> float:
    """Return what the loss of a step is divided by: its loss tokens, or the sum of their rows' weights."""
    return counts.num_loss_tokens if counts.loss_weight is None else counts.loss_weight


class VocabularyPolicy(Policy, Protocol):
    """A policy that says more of each token's distribution than the log-prob of the target."""

    def vocabulary_terms(self, tokens: PackedTokens, *, with_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute ([T] log-probs, [T] log-normalisers, [T] means of the log-probs over the vocabulary or None)."""
        ...


class SupervisedLoss:
    """The micro-batch loss of `rft_algos.objectives.supervised_loss` with all its terms.

    Its forward forms no fused loss: the terms are of the distribution of each token, not of the log-prob alone.
    """

    prepass = False

    def __init__(self, policy: VocabularyPolicy, record: Sft) -> None:
        """Store the policy and the weights of the terms."""
        self._policy = policy
        self._record = record

    @property
    def model(self) -> VocabularyPolicy:
        """The policy that is trained."""
        return self._policy

    def begin(self, batches: object, idle: object) -> None:
        """Raise: nothing is counted before the first backward."""
        raise AssertionError("a supervised loss asks for no pre-pass")

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the loss of a micro-batch, and its metrics."""
        logprobs_T, log_normaliser_T, mean_T = self._policy.vocabulary_terms(
            batch.tokens, with_mean=self._record.label_smoothing > 0
        )
        output: LossOutput = supervised_loss(
            self._record,
            logprobs_T=logprobs_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=denominator(counts),
            num_sequences=counts.num_sequences,
            row_weights_T=batch.row_weights_T,
            vocabulary=VocabularyTerms(mean_T, log_normaliser_T),
        )
        totals.add(output.metrics)
        return MicroBatchOutput(output.loss, logprobs_T)

    def filler(self, batch: TokenBatch) -> Tensor:
        """Return a sum over a batch that does not count, by the same forward."""
        logprobs_T, log_normaliser_T, mean_T = self._policy.vocabulary_terms(
            batch.tokens, with_mean=self._record.label_smoothing > 0
        )
        total = logprobs_T.sum() + log_normaliser_T.sum()
        return total if mean_T is None else total + mean_T.sum()

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Add nothing: every metric is of single tokens."""
