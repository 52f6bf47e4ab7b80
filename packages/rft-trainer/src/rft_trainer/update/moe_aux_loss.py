"""Routers of a mixture of experts in an optimizer step: their losses, their balance, and their loads as metrics.

The frequencies of the load-balancing loss are those of the whole step, so they are counted over all micro-batches and
ranks before the first backward pass: one forward more without gradient, except where the step is one micro-batch on one
rank. Everything else is a sum over rows, which needs no such forward. Loads of the step are summed behind it, and move
the routers' biases where these balance them. Routers without a weight in the loss are watched: the step is the same to
the bit as without that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_algos.losses.routers import balanced_bias, dead_experts, load_entropy, max_violation, router_z_loss
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import BalanceShare, Collectives, RoutedNumbers, RoutedPolicy
from rft_trainer.records.rollouts import Counts, TokenBatch

_LOADS = "router/loads"
"""Name of the loads among the sums of a step."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Weights of what routers are trained with; where all are 0 they are only watched."""

    balance: float = 0.0
    """Weight of the load-balancing loss."""
    z_loss: float = 0.0
    """Weight of the mean over rows and layers of the squared normaliser of the logits."""
    bias_rate: float = 0.0
    """Step of the bias that experts are chosen with; 0 = it stays."""
    bias_rate_end: float = 0.0
    """What a higher `bias_rate` falls to over the run; 0 = it does not fall."""


class MoeAuxLoss:
    """Wrapper of a policy's `token_logprobs` in an optimizer step that keeps what its routers say.

    Example::

        balanced = MoeAuxLoss(policy, RouterWeights(balance=0.001), collectives=ranks)
        balanced.begin(micro_batches)
        logprobs_T, entropy_T = balanced.token_logprobs(...)
        loss = objective(...).loss + balanced.term(batch, counts, totals)
        balanced.after_step(totals)
    """

    def __init__(
        self,
        policy: RoutedPolicy,
        weights: RouterWeights,
        *,
        collectives: Collectives,
        passed: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Store the policy and its weights.

        Args:
            policy: a mixture of experts.
            weights: of its routers.
            collectives: all ranks, each with samples of its own.
            passed: the share of the run's updates that are done, from 0 to 1.

        Raises:
            OptionsError: the bias is to be moved, and the policy's routers have none.
        """
        self._policy = policy
        self._weights = weights
        self._collectives = collectives
        self._passed = passed
        self._counts_E: Tensor | None = None
        self._last: BalanceShare | None = None
        if weights.bias_rate and not policy.router_biases:
            raise no_router_bias(weights.bias_rate)

    @property
    def counts_first(self) -> bool:
        """Return whether the step is counted by `begin` before its first backward pass."""
        return self._weights.balance != 0

    @property
    def has_loss(self) -> bool:
        """Return whether `term` is added to the loss; without one the routers' forwards are those of `watching`."""
        return self._weights.balance != 0 or self._weights.z_loss != 0

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch] = ()) -> None:
        """Count the experts chosen in this rank's micro-batches and sum over ranks; a rank without any calls it too.

        `idle` batches are computed and not counted, where every forward is a collective operation.
        """
        self._counts_E = None
        if not self.counts_first or (len(batches) == 1 and self._collectives.world_size == 1):
            return  # nothing needs the counts; or the one forward counts for itself, as this batch is the step
        counts_E = torch.zeros(self._policy.num_experts, dtype=torch.float64)
        for batch in batches:
            counts_E += self._policy.expert_counts(batch.tokens).cpu()
        # their result is dropped: the other ranks run that many forwards more
        for batch in idle:
            self._policy.expert_counts(batch.tokens)
        # summed once for all micro-batches: a rank without any adds zeros and still takes part
        self._counts_E = self._collectives.sum(counts_E)

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the policy's log-probs and entropies, and keep what the routers of the same forward say."""
        logprobs_T, entropy_T, self._last = self._policy.token_logprobs_and_balance(
            tokens, expert_counts_E=self._counts_E, **options
        )
        return logprobs_T, entropy_T

    @contextmanager
    def watching(self, batch: TokenBatch, totals: MetricTotals) -> Iterator[None]:
        """Add what the routers say of the forward of `batch` within the context to `totals`, and change nothing.

        Metrics: `router/z_loss` and `router/max_logit`; `after_step` has those of the loads.
        """
        with self._policy.watching_routers() as seen:
            yield
        for said in seen:
            self._note(said, batch, totals)

    def term(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> Tensor:
        """Return the routers' losses of the last forward with their weights, and add their metrics to `totals`.

        Metrics: `router/balance`, the load-balancing loss (the number of choices a token has where experts are used
        alike), `router/max_load`, `router/z_loss` and `router/max_logit`.
        """
        assert self._last is not None, "a forward comes first"
        said, weights = self._last, self._weights
        num_tokens = max(counts.num_loss_tokens, 1)
        loss = weights.z_loss * self._note(said, batch, totals) / num_tokens
        if not weights.balance:
            return loss
        num_here = batch.loss_mask_T.sum(dtype=torch.float64)
        totals.add({"router/balance": (said.share, num_here / num_tokens)})
        # of the whole step already: every micro-batch states the same number
        totals.peak("router/max_load", said.max_load)
        return weights.balance * said.share + loss

    def after_step(self, totals: MetricTotals) -> None:
        """Sum the loads of the step over the ranks, move the biases by them, and add their metrics to `totals`.

        They are those of all batches whose metrics are in `totals`. Metrics: `router/max_violation` over the layers,
        its worst and that of each layer, `router/entropy` over the layers and that of each, and `router/dead_experts`.
        Every rank calls it behind a step that was applied.
        """
        own_LE = torch.zeros(self._policy.num_routers, self._policy.num_experts, dtype=torch.float64)
        counted_LE = totals.take_sum(_LOADS)
        if counted_LE is not None:
            own_LE += counted_LE.cpu()
        loads_LE = self._collectives.sum(own_LE)
        if not loads_LE.any():
            return
        if self._weights.bias_rate:
            self._move_biases(loads_LE)
        violation_L = max_violation(loads_LE)
        totals.peak("router/max_violation", violation_L.mean())
        totals.peak("router/max_violation_worst", violation_L.max())
        for layer, violation in enumerate(violation_L):
            totals.peak(f"router/max_violation_layer_{layer}", violation)
        totals.peak("router/dead_experts", dead_experts(loads_LE).sum())
        if loads_LE.shape[-1] > 1:
            entropy_L = load_entropy(loads_LE)
            totals.peak("router/entropy", entropy_L.mean())
            for layer, entropy in enumerate(entropy_L):
                totals.peak(f"router/entropy_layer_{layer}", entropy)

    def _note(self, said: RoutedNumbers, batch: TokenBatch, totals: MetricTotals) -> Tensor:
        """Add the numbers of a forward to `totals`; return the sum over its rows of the penalty on their logits."""
        # with the metrics of the batch: where the step is taken again both are forgotten
        totals.add_sum(_LOADS, said.loads_LE)
        z_loss = router_z_loss(said.log_normaliser_LR).mean(0).sum()
        totals.add({"router/z_loss": (z_loss, batch.loss_mask_T.sum())})
        totals.peak("router/max_logit", said.max_logit)
        return z_loss

    @torch.no_grad()
    def _move_biases(self, loads_LE: Tensor) -> None:
        biases = self._policy.router_biases
        rate = falling_rate(self._weights.bias_rate, self._weights.bias_rate_end, self._passed())
        moved_LE = balanced_bias(torch.stack(biases), loads_LE.to(biases[0].device), rate)
        for bias_E, moved_E in zip(biases, moved_LE, strict=True):
            bias_E.copy_(moved_E)


def falling_rate(rate: float, end: float, passed: float) -> float:
    """Return u (v / u)^t for a rate u above v = `end`, t the share of the run that has `passed`; else u.

    A fixed 0.01 moves a bias further than the scores of experts are apart, so that loads go on to swing; a fixed 0.001
    needs hundreds of updates to get there.
    """
    return rate if not 0 < end < rate else rate * (end / rate) ** min(max(passed, 0.0), 1.0)


def no_router_bias(rate: float) -> OptionsError:
    """Return the error of a bias that is to be moved where routers have none."""
    return OptionsError(
        code="router.no_bias",
        what=f"balance_bias_rate = {rate:g} with routers that have no bias",
        where="--balance_bias_rate",
        why="experts are balanced by a bias that they are chosen with, which this family of models lacks",
        do="--aux_loss_coef 0.01, or a model of the family dots1",
    )
