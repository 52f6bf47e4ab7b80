"""One optimizer step: split the samples, run each micro-batch forward and backward, then step once.

The objective is a function of one packed micro-batch and the denominators of the whole step, so
the sum over micro-batches and ranks is the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rft_trainer.batches.packing import count, filler_batches, pack, rank_micro_batches, split_by_tokens, split_in_order
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, FusedPolicy, Optimizer, Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.moe_aux_loss import MoeAuxLoss


class LossOutput(Protocol):
    """A loss to backpropagate, and its metrics as (total, count)."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def metrics(self) -> Mapping[str, tuple[Tensor, Tensor]]: ...


class Objective(Protocol):
    """The part of an algorithm that turns a micro-batch's log-probs into its share of the loss."""

    @property
    def needs_entropy(self) -> bool: ...
    @property
    def logs_entropy(self) -> bool: ...
    @property
    def by_token(self) -> bool: ...
    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]: ...
    def __call__(
        self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts
    ) -> LossOutput: ...


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Limits of one rank's micro-batches. `by_tokens` fills to `max_tokens`; else at most `max_sequences`, in order."""

    max_sequences: int
    max_tokens: int
    by_tokens: bool

    def cut(self, num_tokens: Sequence[int]) -> list[list[int]]:
        """Split samples of these lengths into micro-batches; return the indices of each."""
        if self.by_tokens:
            # without a cap: as many tokens as the largest micro-batch in order may have
            budget = self.max_tokens or self.max_sequences * max(num_tokens, default=0)
            return split_by_tokens(num_tokens, budget) if num_tokens else []
        return split_in_order(num_tokens, self.max_sequences, self.max_tokens)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Result of one optimizer step, the same on every rank."""

    gradient_norm: float
    applied: bool
    learning_rate: float
    num_micro_batches: int
    loss_scale: float | None = None
    """Loss scale of float16 training; a refused step has made it smaller. None = no loss scaling."""

    @property
    def sound(self) -> bool:
        """Return whether the step was applied, or refused under a loss scale.

        The scale is smaller then, and ends the run where that does not help.
        """
        return self.applied or self.loss_scale is not None


class Updater:
    """Optimizer steps on samples; without state of its own besides its collaborators."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        objective: Objective,
        collectives: Collectives,
        *,
        micro_batching: MicroBatching,
        learning_rate: Callable[[int], float],
        temperature: float = 1.0,
        device: str = "cpu",
        pin_memory: bool = False,
        balanced: MoeAuxLoss | None = None,
        fused: FusedPolicy | None = None,
        collective_forward: bool = False,
    ) -> None:
        """Store the policy, its optimizer and the micro-batch limits.

        `collective_forward`: every forward and backward is a collective operation, so all ranks must run equally many.
        """
        self._collective_forward = collective_forward
        self._policy = policy
        self._balanced = balanced
        self._fused = fused
        self._optimizer = optimizer
        self._objective = objective
        self._collectives = collectives
        self._micro_batching = micro_batching
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._device = device
        self._pin_memory = pin_memory

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self._policy

    def __call__(
        self,
        samples: Sequence[TrainingSample],
        update_index: int,
        totals: MetricTotals,
        counts: Counts | None = None,
        gaps: MismatchMonitor | None = None,
    ) -> UpdateOutcome:
        """Take one optimizer step on `samples`, which every rank has in full; each rank trains its share.

        `counts` are the denominators where they differ from the samples' own: samples whose gradient
        is exactly zero may be left out of `samples` while they stay in the denominators. `gaps` records the
        log-probs; it may refuse the step, before any weight has changed.
        """
        # over all ranks and micro-batches: each then adds its share of the gradient, and sums need no weights
        counts = counts or count(samples)
        ranks = self._collectives
        micro_batches = rank_micro_batches(samples, ranks.rank, ranks.world_size, self._micro_batching.cut)
        idle = (
            filler_batches(samples, ranks, self._micro_batching.cut, self._device) if self._collective_forward else []
        )
        # fillers count too, since the optimizer must be told which backward of this rank is its last
        turns = len(micro_batches) + len(idle)
        if self._balanced is not None:
            # expert frequencies are those of the whole step, so they are counted before the first backward
            self._balanced.begin([pack(chosen, self._device) for chosen in micro_batches], idle)
        for number, chosen in enumerate(micro_batches, start=1):
            batch = pack(chosen, self._device, pin_memory=self._pin_memory)
            logprobs_T = self._backward(batch, counts, totals, last=number == turns)
            if batch.behaviour_logprobs_T is not None:
                _add_gap(batch, logprobs_T, totals)
            if gaps is not None:
                gaps.add(chosen, batch, logprobs_T)
        # behind the micro-batches, whose number differs between ranks: the sum of both is the same on all
        for number, batch in enumerate(idle, start=1 + len(micro_batches)):
            self._filler_pass(batch, last=number == turns)
        if gaps is not None:
            gaps.judge()  # after all backward passes, before any weight changes
        # every rank knows the samples that are left out; counted on each, they would be summed once a rank
        if self._collectives.rank == 0:
            self._count_left_out(samples, counts, totals)
        learning_rate = self._learning_rate(update_index)
        outcome = self._optimizer.step(learning_rate)
        return UpdateOutcome(
            outcome.gradient_norm, outcome.applied, learning_rate, len(micro_batches), outcome.loss_scale
        )

    def _filler_pass(self, batch: TokenBatch, *, last: bool) -> None:
        """Run a zero-gradient micro-batch so that collectives match on all ranks."""
        logprobs_T, _ = self._policy.token_logprobs(
            batch.tokens,
            temperature=self._temperature,
        )
        # times 0 rather than no backward: its collectives run, and every gradient stays as it is
        self._optimizer.backward(logprobs_T.sum() * 0.0, last=last)

    def _count_left_out(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Count left-out samples in the loss metrics: 0 in the total, their share in the count."""
        # with their share in the count, the mean of the metric is the loss
        missing = counts.num_loss_tokens - count(samples).num_loss_tokens
        if missing:
            pair = torch.zeros(()), torch.tensor(missing / counts.num_loss_tokens, dtype=torch.float64)
            totals.add({"policy/loss": pair, "policy/surrogate": pair})

    def _backward(self, batch: TokenBatch, counts: Counts, totals: MetricTotals, *, last: bool) -> Tensor:
        """Accumulate the gradient of a micro-batch; return its log-probs [T]."""
        if self._fused is not None and self._fuses(self._fused, batch):
            return self._backward_fused(self._fused, batch, counts, totals, last=last)
        forward = self._policy.token_logprobs if self._balanced is None else self._balanced.token_logprobs
        logprobs_T, entropy_T = forward(
            batch.tokens,
            temperature=self._temperature,
            with_entropy=self._objective.needs_entropy or self._objective.logs_entropy,
            entropy_gradient=self._objective.needs_entropy,
        )
        output = self._objective(batch, logprobs_T, entropy_T, counts)
        loss = output.loss
        if self._balanced is not None:
            loss = loss + self._balanced.term(batch, counts, totals)
        self._optimizer.backward(loss, last=last)
        totals.add(output.metrics)
        return logprobs_T

    def _fuses(self, policy: FusedPolicy, batch: TokenBatch) -> bool:
        # the fused loss returns no share of the routers' loss, and sees one token at a time
        if self._balanced is not None or not self._objective.by_token:
            return False
        num_loss_tokens = int(batch.loss_mask_T.sum())
        return num_loss_tokens > 0 and policy.prefers_fused_loss(num_loss_tokens)

    def _backward_fused(
        self, policy: FusedPolicy, batch: TokenBatch, counts: Counts, totals: MetricTotals, *, last: bool
    ) -> Tensor:
        """Accumulate the gradient with the fused loss, which differentiates tokens where their logits are."""
        fused = policy.fused_loss(
            batch.tokens,
            self._objective.token_losses(batch, counts),
            temperature=self._temperature,
        )
        # the same equations on the log-probs that the fused loss returns: metrics only, its gradient is made already
        with torch.no_grad():
            metrics = self._objective(batch, fused.logprobs, fused.entropy, counts).metrics
        self._optimizer.backward(fused.loss, last=last)
        totals.add(metrics)
        return fused.logprobs


def scale_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Return the loss scale of the last step and the number of skipped steps, by metric name; empty without scaling."""
    if not outcomes or outcomes[-1].loss_scale is None:
        return {}
    skipped = sum(not outcome.applied for outcome in outcomes)
    return {f"{part}/loss_scale": outcomes[-1].loss_scale, f"{part}/updates_skipped": skipped}


def _add_gap(batch: TokenBatch, logprobs_T: Tensor, totals: MetricTotals) -> None:
    """Add the gap between the trainer's log-probs and the engine's to the metrics, in nats a token."""
    assert batch.behaviour_logprobs_T is not None
    gap = torch.where(batch.loss_mask_T, (logprobs_T.detach() - batch.behaviour_logprobs_T).abs(), 0.0)
    totals.add({"policy/logprob_gap": (gap.sum(), batch.loss_mask_T.sum())})
    totals.peak("policy/logprob_gap_max", gap.max())
