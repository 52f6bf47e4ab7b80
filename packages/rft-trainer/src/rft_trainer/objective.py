"""The algorithm's record applied to this package's batches: the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rft_algos import objectives
from rft_algos.algorithms import PolicyAlgorithm
from rft_algos.objectives import Coefficients
from rft_trainer.records import Counts, TokenBatch


class PolicyObjective:
    """The record's policy loss on one micro-batch."""

    def __init__(self, record: PolicyAlgorithm, coefficients: Callable[[], Coefficients] | None = None) -> None:
        self._record = record
        self._coefficients = coefficients or (lambda: Coefficients.of(record))

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term, so that gradients flow through the entropy."""
        return self._record.needs_entropy

    @property
    def logs_entropy(self) -> bool:
        """Always: a policy that collapses shows in its entropy first."""
        return True

    def __call__(
        self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts
    ) -> objectives.LossOutput:
        """Loss with the denominators of the whole optimizer step."""
        old_logprobs_T = batch.old_logprobs_T
        if old_logprobs_T is None:  # only prompts in this micro-batch: nothing is masked in
            old_logprobs_T = torch.zeros_like(logprobs_T)
        return objectives.policy_loss(
            self._record,
            logprobs_T=logprobs_T,
            old_logprobs_T=old_logprobs_T,
            reference_logprobs_T=batch.reference_logprobs_T,
            advantages_T=batch.advantages_T,
            loss_mask_T=batch.loss_mask_T,
            segment_ids_T=batch.segment_ids_T,
            entropy_T=entropy_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
            behaviour_logprobs_T=batch.behaviour_logprobs_T,
            token_weights_T=batch.token_weights_T,
            selected_T=batch.selected_T,
            coefficients=self._coefficients(),
        )
