"""Critic of a training step: values of all rollouts before it, and optimizer steps on the value loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rft_algos.algorithms.published import Aggregation
from rft_algos.losses import aggregation as reductions
from rft_algos.losses.value import clipped_value_loss, value_clipped, value_moments
from rft_algos.objectives import LossOutput, token_weights
from rft_trainer.batches.packing import count, filler_batches, pack, rank_micro_batches
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, Critic, Optimizer
from rft_trainer.records.rollouts import Counts, RolloutGroup, TokenBatch, TrainingSample
from rft_trainer.scoring.sharded_forward import ShardedTokenForward
from rft_trainer.update.optimizer_step import MicroBatching, UpdateOutcome


class ValueAnnotator:
    """Scorer of responses under a critic; every rank gets the values of all responses, in order."""

    def __init__(
        self,
        critic: Critic,
        collectives: Collectives,
        *,
        max_sequences: int,
        max_tokens: int,
        device: str = "cpu",
        collective_forward: bool = False,
    ) -> None:
        """Store the critic and the micro-batch limits; `collective_forward` as in `ShardedTokenForward`."""
        self._critic = critic
        self._device = device
        self._all_ranks = ShardedTokenForward(
            self._values,
            collectives,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            collective_forward=collective_forward,
        )

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[tuple[float, ...]]:
        """Return a tuple a rollout in `flat_rollouts` order: a value for each response token, before it is sampled."""
        return self._all_ranks(groups)

    def _values(self, samples: Sequence[TrainingSample]) -> Tensor:
        return _values(self._critic, pack(samples, self._device))


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Value loss of a micro-batch with its metrics; the token weights are those of the aggregation.

    Example: `ValueObjective(clip=0.2, aggregation="sequence_mean_token_mean")`.

    Metrics are (total, count) pairs:

        critic/loss            what is minimised: totals add up to it, counts to 1 over the step's tokens
        critic/clip_fraction   share of tokens whose gradient the clip took away
        critic/value_mean      mean value, of the critic as it is now
        critic/return_mean     mean return
    """

    clip: float | None
    """How far a value may move from the old one, in the unit of the rewards; None for no bound."""
    aggregation: Aggregation = "token_mean"
    max_tokens: int | None = None
    """The constant length that the aggregation "fixed_length" divides by."""

    def __call__(self, batch: TokenBatch, values_T: Tensor, counts: Counts) -> LossOutput:
        """Compute the value loss with the denominators of the whole optimizer step."""
        mask_T = batch.loss_mask_T
        dtype = torch.promote_types(values_T.dtype, torch.float32)

        def masked(tensor_T: Tensor | None) -> Tensor:
            # before any equation; None where the micro-batch has only prompts, so that nothing is masked in
            return torch.zeros_like(values_T) if tensor_T is None else tensor_T.to(dtype).where(mask_T, 0)

        values_T, old_values_T, returns_T = masked(values_T), masked(batch.old_values_T), masked(batch.returns_T)
        weights_T = token_weights(
            self,
            loss_mask_T=mask_T,
            segment_ids_T=batch.segment_ids_T,
            num_loss_tokens=counts.num_loss_tokens,
            num_sequences=counts.num_sequences,
            dtype=dtype,
        )
        loss = reductions.weighted_sum(weights_T, clipped_value_loss(values_T, old_values_T, returns_T, self.clip))
        num_here = mask_T.sum(dtype=torch.float64)
        clipped_T = value_clipped(values_T, old_values_T, returns_T, self.clip)
        metrics = {
            "critic/loss": (loss.detach().double(), num_here / max(counts.num_loss_tokens, 1)),
            "critic/clip_fraction": (clipped_T.sum(dtype=torch.float64), num_here),
            "critic/value_mean": (values_T.detach().sum(dtype=torch.float64), num_here),
            "critic/return_mean": (returns_T.sum(dtype=torch.float64), num_here),
        }
        return LossOutput(loss, metrics)


class CriticUpdater:
    """Optimizer steps on the value loss; without state of its own besides its collaborators."""

    def __init__(
        self,
        critic: Critic,
        optimizer: Optimizer,
        objective: ValueObjective,
        collectives: Collectives,
        *,
        micro_batching: MicroBatching,
        learning_rate: Callable[[int], float],
        device: str = "cpu",
        pin_memory: bool = False,
        collective_forward: bool = False,
    ) -> None:
        """Store the critic, its optimizer and the micro-batch limits.

        `collective_forward`: every forward and backward is a collective operation, so all ranks must run equally many.
        """
        self._collective_forward = collective_forward
        self._critic = critic
        self._optimizer = optimizer
        self._objective = objective
        self._collectives = collectives
        self._micro_batching = micro_batching
        self._learning_rate = learning_rate
        self._device = device
        self._pin_memory = pin_memory

    def __call__(self, samples: Sequence[TrainingSample], update_index: int, totals: MetricTotals) -> UpdateOutcome:
        """Take one optimizer step on `samples`, which every rank has in full; each rank trains its share.

        Samples carry `old_values` and `returns`. Those whose advantage is zero have a value to learn too.
        Adds `critic/explained_variance` besides the objective's metrics.
        """
        for sample in samples:
            has_both = len(sample.old_values) == len(sample.returns) == sample.num_tokens - sample.prompt_length
            assert has_both, f"sample {sample.sample_id} needs old_values and returns for the value loss"
        # all samples, also those that the policy leaves out: a value is learned where the advantage is 0
        counts = count(samples)
        ranks = self._collectives
        micro_batches = rank_micro_batches(samples, ranks.rank, ranks.world_size, self._micro_batching.cut)
        idle = (
            filler_batches(samples, ranks, self._micro_batching.cut, self._device) if self._collective_forward else []
        )
        for number, chosen in enumerate(micro_batches, start=1):
            batch = pack(chosen, self._device, pin_memory=self._pin_memory)
            output = self._objective(batch, _values(self._critic, batch), counts)
            self._optimizer.backward(output.loss, last=number == len(micro_batches) + len(idle))
            totals.add(output.metrics)
        # times 0: filler batches only match the other ranks' collectives
        for number, batch in enumerate(idle, start=1):
            self._optimizer.backward(_values(self._critic, batch).sum() * 0.0, last=number == len(idle))
        if ranks.rank == 0:  # every rank has all samples: once, or the sum over ranks counts it again
            totals.add({"critic/explained_variance": explained_variance(samples)})
        learning_rate = self._learning_rate(update_index)
        outcome = self._optimizer.step(learning_rate)
        return UpdateOutcome(outcome.gradient_norm, outcome.applied, learning_rate, len(micro_batches))


def explained_variance(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    """Compute (total, count) of 1 - Var(G - V) / Var(G) over the loss tokens; count is 0 where all returns are equal.

    V are the old values, estimated before the returns were known: the critic is measured on data that it has not
    learned from. They are known to every rank, so that the variances are about the mean of all samples.
    """
    # in float64: the result is a difference of two sums of squares that may be almost equal
    returns_T, old_values_T = (
        torch.tensor(list(chain.from_iterable(_over_loss_tokens(s, name) for s in samples)), dtype=torch.float64)
        for name in ("returns", "old_values")
    )
    moments = value_moments(old_values_T, returns_T, torch.ones_like(returns_T, dtype=torch.bool))
    return moments.returns_m2 - moments.residuals_m2, moments.returns_m2


def _over_loss_tokens(sample: TrainingSample, name: str) -> Sequence[float]:
    values: tuple[float, ...] = getattr(sample, name)
    # without a prompt the first token is not predicted, so it is in no loss
    first = max(1 - sample.prompt_length, 0)
    kept = sample.loss_mask or (True,) * len(values)
    return [value for value, learned in zip(values[first:], kept[first:], strict=True) if learned]


def _values(critic: Critic, batch: TokenBatch) -> Tensor:
    return critic.values(batch.tokens)
