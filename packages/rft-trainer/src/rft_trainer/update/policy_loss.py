"""Loss of a policy on a micro-batch: its algorithm's objective, and the routers' auxiliary loss beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from rft_trainer.batches.packing import count
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import FusedPolicy, Policy
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.moe_aux_loss import MoeAuxLoss
from rft_trainer.update.optimizer_step import MicroBatchOutput


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
    def check(self, samples: Sequence[TrainingSample]) -> None: ...
    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]: ...
    def __call__(
        self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts
    ) -> LossOutput: ...


class PolicyLoss:
    """The micro-batch loss of a policy: forward, objective, auxiliary loss; its outputs are the tokens' log-probs."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        *,
        temperature: float = 1.0,
        balanced: MoeAuxLoss | None = None,
        fused: FusedPolicy | None = None,
    ) -> None:
        """Store the policy and its objective.

        Args:
            policy: the model that is trained.
            objective: of the algorithm.
            temperature: that the samples were drawn at; 1 on demonstrations.
            balanced: what the routers of a mixture of experts add, or that they are watched.
            fused: the policy, where it can evaluate the objective in its output head.
        """
        self._policy = policy
        self._objective = objective
        self._temperature = temperature
        self._balanced = balanced
        self._fused = fused

    @property
    def model(self) -> Policy:
        """The policy that is trained."""
        return self._policy

    def with_objective(self, objective: Objective, *, temperature: float | None = None) -> PolicyLoss:
        """Return the loss of the same policy for another objective; `temperature` None = the same."""
        return PolicyLoss(
            self._policy,
            objective,
            temperature=self._temperature if temperature is None else temperature,
            balanced=self._balanced,
            fused=self._fused,
        )

    @property
    def prepass(self) -> bool:
        """Loads of experts that are in the loss are those of the whole step: they are counted before its backward."""
        return self._balanced is not None and self._balanced.counts_first

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        """Count the experts that the step chooses."""
        assert self._balanced is not None, "a policy without an auxiliary loss asks for no pre-pass"
        self._balanced.begin(batches, idle)

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the loss of a micro-batch, and its metrics."""
        routers = self._balanced
        with nullcontext() if routers is None or routers.has_loss else routers.watching(batch, totals):
            if self._fused is not None and self._fuses(self._fused, batch):
                output = self._fused_output(self._fused, batch, counts, totals)
            else:
                output = self._output(batch, counts, totals)
        if batch.behaviour_logprobs_T is not None:
            _add_gap(batch, output.outputs_T, totals)
        return output

    def filler(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the log-probs of a batch that does not count."""
        logprobs_T, _ = self._policy.token_logprobs(batch.tokens, temperature=self._temperature)
        return logprobs_T.sum()

    def after_step(self, totals: MetricTotals) -> None:
        """Balance the experts by the loads of the step, and add these to its metrics."""
        if self._balanced is not None:
            self._balanced.after_step(totals)

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Count samples that are left out for their advantage of zero in the loss metrics.

        They add 0 to the total and their share to the count.
        """
        # with their share in the count, the mean of the metric is the loss
        missing = counts.num_loss_tokens - count(samples).num_loss_tokens
        if missing:
            pair = torch.zeros(()), torch.tensor(missing / counts.num_loss_tokens, dtype=torch.float64)
            totals.add({"policy/loss": pair, "policy/surrogate": pair})

    def _output(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        balanced = self._balanced if self._balanced is not None and self._balanced.has_loss else None
        forward = self._policy.token_logprobs if balanced is None else balanced.token_logprobs
        logprobs_T, entropy_T = forward(
            batch.tokens,
            temperature=self._temperature,
            with_entropy=self._objective.needs_entropy or self._objective.logs_entropy,
            entropy_gradient=self._objective.needs_entropy,
        )
        output = self._objective(batch, logprobs_T, entropy_T, counts)
        loss = output.loss
        if balanced is not None:
            loss = loss + balanced.term(batch, counts, totals)
        totals.add(output.metrics)
        return MicroBatchOutput(loss, logprobs_T)

    def _fuses(self, policy: FusedPolicy, batch: TokenBatch) -> bool:
        # the fused loss returns no share of the routers' loss, and sees one token at a time
        if (self._balanced is not None and self._balanced.has_loss) or not self._objective.by_token:
            return False
        num_loss_tokens = batch.num_loss_tokens
        return num_loss_tokens > 0 and policy.prefers_fused_loss(num_loss_tokens)

    def _fused_output(
        self, policy: FusedPolicy, batch: TokenBatch, counts: Counts, totals: MetricTotals
    ) -> MicroBatchOutput:
        """Compute the loss in the output head, which differentiates tokens where their logits are."""
        fused = policy.fused_loss(
            batch.tokens,
            self._objective.token_losses(batch, counts),
            temperature=self._temperature,
        )
        # the same equations on the log-probs that the fused loss returns: metrics only, its gradient is made already
        with torch.no_grad():
            totals.add(self._objective(batch, fused.logprobs, fused.entropy, counts).metrics)
        return MicroBatchOutput(fused.loss, fused.logprobs)


def _add_gap(batch: TokenBatch, logprobs_T: Tensor, totals: MetricTotals) -> None:
    """Add the gap between the trainer's log-probs and the engine's to the metrics, in nats a token."""
    assert batch.behaviour_logprobs_T is not None
    gap = torch.where(batch.loss_mask_T, (logprobs_T.detach() - batch.behaviour_logprobs_T).abs(), 0.0)
    totals.add({"policy/logprob_gap": (gap.sum(), batch.loss_mask_T.sum())})
    totals.peak("policy/logprob_gap_max", gap.max())
