"""Objectives of preference training: a micro-batch of pairs, or of labelled responses, to its share of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.algorithms.preference import PreferenceLoss
from rft_algos.losses.preference_variants import Pairs
from rft_algos.objectives import LossOutput
from rft_algos.objectives.preference_loss import (
    PairLogprobs,
    implicit_rewards,
    labelled_losses,
    pair_losses,
    pairs_in_order,
)
from rft_trainer.batches.sequence_values import pair_values, sequence_sums
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample

PREFIX = "dpo"
"""Prefix of the metrics of every loss of preferences."""


class _OfSequences:
    """Answers of every objective of whole sequences: its loss is no sum over tokens by themselves."""

    needs_entropy = False
    logs_entropy = False
    by_token = False

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Take any samples: those of the stage have the log-probs that its loss needs."""

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return nothing that may be called: it is asked of objectives of single tokens alone."""
        raise AssertionError("a loss of sequences is not computed token by token")


@dataclass(slots=True)
class PairObjective(_OfSequences):
    """Mean loss over the pairs of the whole optimizer step, each with its weight.

    A micro-batch holds chosen and rejected responses in turn. The weight of a pair stands as the advantage of its
    samples; weights are 1 on average over the step. `token_weights` scale single tokens (LD-DPO).
    """

    config: PreferenceLoss

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the share of a micro-batch with the denominators of the whole optimizer step."""
        of = pair_logprobs(batch, logprobs_T)
        weights_B = pair_values(segment_values(batch, batch.advantages_T), batch)[0]
        losses_B = pair_losses(self.config, of) * weights_B
        loss = losses_B.sum() / counts.num_units
        share = losses_B.new_tensor(len(losses_B) / counts.num_units, dtype=torch.float64)
        return LossOutput(loss, {f"{PREFIX}/loss": (loss.detach(), share), **pair_metrics(self.config, of)})


@dataclass(slots=True)
class LabelledObjective(_OfSequences):
    """Mean loss over the labelled responses of the whole optimizer step (KTO).

    The advantage of a sample is the weight of its response, below 0 where the response is bad.
    """

    config: PreferenceLoss
    reference_point: float = 0.0
    """z of the step, in nats, from all of its prompts on all ranks."""

    def measure_from(self, reference_point: float) -> dict[str, float]:
        """Take the reference point of the next step; return it as a metric."""
        self.reference_point = reference_point
        return {f"{PREFIX}/reference_point": reference_point}

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the share of a micro-batch with the denominators of the whole optimizer step."""
        policy_S, reference_S = _sums(batch, logprobs_T)
        signs_S = segment_values(batch, batch.advantages_T)
        good_S = signs_S > 0
        losses_S = labelled_losses(self.config, policy_S, reference_S, good_S, self.reference_point) * signs_S.abs()
        loss = losses_S.sum() / counts.num_units
        share = losses_S.new_tensor(len(losses_S) / counts.num_units, dtype=torch.float64)
        metrics = {f"{PREFIX}/loss": (loss.detach(), share)}
        return LossOutput(loss, metrics | labelled_metrics(self.config, policy_S, reference_S, good_S))


def pair_logprobs(batch: TokenBatch, logprobs_T: Tensor) -> PairLogprobs:
    """Sum the log-probs of every response, and divide them into those of chosen and of rejected ones."""
    policy_S, reference_S = _sums(batch, logprobs_T)
    chosen_B, rejected_B = pair_values(policy_S, batch)
    reference_chosen_B, reference_rejected_B = pair_values(reference_S, batch)
    lengths_S = sequence_sums(_token_weights(batch, logprobs_T), batch)
    chosen_lengths_B, rejected_lengths_B = pair_values(lengths_S, batch)
    pairs = Pairs(chosen_B, rejected_B, reference_chosen_B, reference_rejected_B)
    # a pair has one number, its margin, where the rows have a column of them
    numbers_SN = batch.sequence_numbers_SN
    margins_B = None if numbers_SN is None else pair_values(numbers_SN[:, 0], batch)[0]
    return PairLogprobs(pairs, chosen_lengths_B, rejected_lengths_B, margins_B)


def pair_metrics(config: PreferenceLoss, of: PairLogprobs) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (total, count) of rewards, accuracy, margin and log-probs over the pairs."""
    chosen_B, rejected_B = (values_B.detach() for values_B in implicit_rewards(config, of))
    number = torch.tensor(len(chosen_B), device=chosen_B.device)
    found = {
        "accuracy": pairs_in_order(config, of).double(),
        "margin": chosen_B - rejected_B,
        "chosen_reward": chosen_B,
        "rejected_reward": rejected_B,
        "chosen_logprob": of.pairs.policy_chosen_B,
        "rejected_logprob": of.pairs.policy_rejected_B,
    }
    metrics = {f"{PREFIX}/{name}": (values_B.detach().sum(), number) for name, values_B in found.items()}
    if config.needs_reference:
        ratios = of.pairs.chosen_B.detach().sum() + of.pairs.rejected_B.detach().sum()
        metrics[f"{PREFIX}/log_ratio"] = ratios, (of.chosen_lengths_B + of.rejected_lengths_B).sum()
    return metrics


def labelled_metrics(
    config: PreferenceLoss, policy_S: Tensor, reference_S: Tensor, good_S: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (total, count) of rewards and log-probs over good and over bad responses."""
    policy_S = policy_S.detach()
    rewards_S = config.strength * (policy_S - reference_S)
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    for name, mask_S in (("chosen", good_S), ("rejected", ~good_S)):
        metrics[f"{PREFIX}/{name}_reward"] = rewards_S[mask_S].sum(), mask_S.sum()
        metrics[f"{PREFIX}/{name}_logprob"] = policy_S[mask_S].sum(), mask_S.sum()
    return metrics


def segment_values(batch: TokenBatch, values_T: Tensor) -> Tensor:
    """Return [S]: the value at the first token of every segment."""
    return values_T[batch.positions_T == 0]


def _sums(batch: TokenBatch, logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return [S] sums of the log-probs of the responses under the policy and under the reference, 0 without one."""
    weights_T = _token_weights(batch, logprobs_T)
    reference_T = batch.reference_logprobs_T
    reference_S = sequence_sums(torch.zeros_like(weights_T) if reference_T is None else reference_T * weights_T, batch)
    return sequence_sums(logprobs_T * weights_T, batch), reference_S


def _token_weights(batch: TokenBatch, like_T: Tensor) -> Tensor:
    if batch.token_weights_T is None:
        return torch.ones_like(like_T, requires_grad=False)
    return batch.token_weights_T.to(like_T.dtype)
