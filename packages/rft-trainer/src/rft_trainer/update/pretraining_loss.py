"""The pre-training term of a policy's loss (PTX): the likelihood of demonstrations or texts beside the rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rft_algos.algorithms.published import Sft
from rft_algos.objectives import LossOutput, supervised_loss, token_weights
from rft_trainer.batches.keyed_batches import KeyedBatches
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.optimizer_step import MicroBatchLoss


class PretrainingLikelihood:
    """coefficient * mean negative log-likelihood a token, over all rows of the optimizer step.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback"
    (arXiv 2203.02155), equation 2, whose gamma is the coefficient.
    """

    needs_entropy = False
    logs_entropy = False
    by_token = True

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Take any samples: the likelihood needs no log-probs but the policy's."""

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function (log-probs [N], entropies [N], token indices [N]) -> their shares [N] of the loss."""
        weights_T = self._coefficient * token_weights(
            Sft(),
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
        )
        return lambda logprobs_N, entropy_N, tokens_N: -weights_T[tokens_N].to(logprobs_N.dtype) * logprobs_N

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the share of a micro-batch with the denominators of the step; ptx/loss is without coefficient."""
        found = supervised_loss(
            Sft(),
            logprobs_T=logprobs_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
        )
        return LossOutput(self._coefficient * found.loss, {"ptx/loss": found.metrics["sft/loss"]})


@dataclass(frozen=True, slots=True)
class PretrainingTerm:
    """The term of every update of the policy: its rows by the number of the update, and their loss."""

    rows: KeyedBatches
    loss: MicroBatchLoss
