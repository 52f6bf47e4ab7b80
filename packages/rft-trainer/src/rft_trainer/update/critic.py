"""Critic of a training step: values of all rollouts before it, and optimizer steps on the value loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rft_algos.algorithms.published import Aggregation
from rft_algos.losses import aggregation as reductions
from rft_algos.losses.value import clipped_value_loss, value_clipped, value_moments
from rft_algos.objectives import LossOutput, token_weights
from rft_trainer.batches.packing import pack
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, Critic
from rft_trainer.records.rollouts import Counts, RolloutGroup, TokenBatch, TrainingSample
from rft_trainer.scoring.sharded_forward import ShardedTokenForward
from rft_trainer.update.optimizer_step import MicroBatchOutput


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


class ValueLoss:
    """The micro-batch loss of a critic; its outputs are the tokens' values.

    Samples carry `old_values` and `returns`. Those whose advantage is zero have a value to learn too.
    """

    prepass = False

    def __init__(self, critic: Critic, objective: ValueObjective) -> None:
        self._critic = critic
        self._objective = objective

    @property
    def model(self) -> Critic:
        """The critic that is trained."""
        return self._critic

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        """Do nothing: the value loss of a micro-batch needs no other."""

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the value loss of a micro-batch, and its metrics."""
        has_both = batch.old_values_T is not None and batch.returns_T is not None
        assert has_both or not bool(batch.loss_mask_T.any()), "samples need old_values and returns for the value loss"
        values_T = _values(self._critic, batch)
        output = self._objective(batch, values_T, counts)
        totals.add(output.metrics)
        return MicroBatchOutput(output.loss, values_T)

    def filler(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the values of a batch that does not count."""
        return _values(self._critic, batch).sum()

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Add the metric `critic/explained_variance`."""
        del counts
        totals.add({"critic/explained_variance": explained_variance(samples)})


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
