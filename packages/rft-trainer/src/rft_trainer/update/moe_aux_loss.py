"""Load-balancing auxiliary loss of a mixture of experts, added to the objective of an optimizer step.

Its frequencies are those of the whole step, so they are counted over all micro-batches and ranks before the first
backward pass: one forward more without gradient, except where the step is one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import BalanceShare, Collectives, RoutedPolicy
from rft_trainer.records.rollouts import Counts, TokenBatch


class MoeAuxLoss:
    """Wrapper of a policy's `token_logprobs` in an optimizer step that keeps the routers' auxiliary loss.

    Example::

        balanced = MoeAuxLoss(policy, coefficient=0.001, collectives=ranks)
        balanced.begin(micro_batches)
        logprobs_T, entropy_T = balanced.token_logprobs(...)
        loss = objective(...).loss + balanced.term(batch, counts, totals)
    """

    def __init__(self, policy: RoutedPolicy, *, coefficient: float, collectives: Collectives) -> None:
        self._policy = policy
        self._coefficient = coefficient
        self._collectives = collectives
        self._counts_E: Tensor | None = None
        self._last: BalanceShare | None = None

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch] = ()) -> None:
        """Count the experts chosen in this rank's micro-batches and sum over ranks; a rank without any calls it too.

        `idle` batches are computed and not counted, where every forward is a collective operation.
        """
        self._counts_E = None
        if len(batches) == 1 and self._collectives.world_size == 1:
            return  # the one forward counts for itself: this batch is the step
        counts_E = torch.zeros(self._policy.num_experts, dtype=torch.float64)
        for batch in batches:
            counts_E += self._policy.expert_counts(batch.tokens).cpu()
        # their result is dropped: the other ranks run that many forwards more
        for batch in idle:
            self._policy.expert_counts(batch.tokens)
        # summed once for all micro-batches: a rank without any adds zeros and still takes part
        self._counts_E = self._collectives.sum(counts_E)

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the policy's log-probs and entropies, and keep the auxiliary loss of the same forward."""
        logprobs_T, entropy_T, self._last = self._policy.token_logprobs_and_balance(
            tokens, expert_counts_E=self._counts_E, **options
        )
        return logprobs_T, entropy_T

    def term(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> Tensor:
        """Return the auxiliary loss of the last forward, coefficient x share, and add its metrics to `totals`.

        Metrics: `router/balance`, the loss itself (the number of choices a token has where experts are used alike),
        and `router/max_load`.
        """
        assert self._last is not None, "a forward comes first"
        num_here = batch.loss_mask_T.sum(dtype=torch.float64)
        totals.add({"router/balance": (self._last.share, num_here / max(counts.num_loss_tokens, 1))})
        # of the whole step already: every micro-batch states the same number
        totals.peak("router/max_load", self._last.max_load)
        return self._coefficient * self._last.share
