"""The algorithm's record applied to this package's batches: loss of a micro-batch, rewards, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from rft_algos import objectives
from rft_algos.algorithms import PolicyAlgorithm
from rft_trainer.records import Counts, TokenBatch


class PolicyObjective:
    """The record's policy loss on one micro-batch."""

    def __init__(self, record: PolicyAlgorithm) -> None:
        self._record = record

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
        )


class GroupAdvantages:
    """The record's advantages of all rollouts of a step."""

    def __init__(self, record: PolicyAlgorithm) -> None:
        self._record = record

    def __call__(self, rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
        """[N] float64."""
        return objectives.advantages(self._record, rewards_N=rewards_N, group_ids_N=group_ids_N)


class PenalisedRewards:
    """Rewards less the divergence from the reference policy, for records that place it there."""

    def __init__(self, record: PolicyAlgorithm) -> None:
        self._record = record

    def __call__(
        self, rewards_N: Tensor, old: Sequence[tuple[float, ...]], reference: Sequence[tuple[float, ...]]
    ) -> Tensor:
        """[N] float64; `old` and `reference` hold the log-probs of each response's tokens."""
        lengths = torch.tensor([len(row) for row in old])
        logprobs_T = torch.tensor(list(chain.from_iterable(old)), dtype=torch.float64)
        return objectives.penalised_rewards(
            self._record,
            rewards_N=rewards_N,
            logprobs_T=logprobs_T,
            reference_logprobs_T=torch.tensor(list(chain.from_iterable(reference)), dtype=torch.float64),
            loss_mask_T=torch.ones(len(logprobs_T), dtype=torch.bool),
            sequence_index_T=torch.repeat_interleave(torch.arange(len(old)), lengths),
        )
