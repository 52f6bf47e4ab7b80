"""Held-out evaluation of preferences: loss, share of pairs in order with its interval, rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from rft_algos.algorithms.preference import PreferenceLoss
from rft_algos.objectives.preference_loss import (
    implicit_rewards,
    in_order,
    labelled_losses,
    pair_losses,
    pairs_in_order,
)
from rft_algos.statistics import wilson_interval
from rft_trainer.batches.packing import pack
from rft_trainer.batches.sequence_values import sequence_sums
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.reference_logprobs import LogprobTable, Score
from rft_trainer.update.preference_objective import pair_logprobs

_CHUNK = 256
"""Pairs whose numbers are computed at once."""


@dataclass(frozen=True, slots=True)
class PreferenceResult:
    """Result of one evaluation: lists have one number a pair, or a labelled response, in their order."""

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    margins: tuple[float, ...]
    """Reward of the chosen response above that of the rejected one; of labelled responses their rewards, with the sign
    of the label."""
    chosen: tuple[float, ...]
    """Rewards of chosen, or of good responses."""
    rejected: tuple[float, ...]
    correct: tuple[float, ...]
    """1 where the chosen response has the higher reward, 0 where the rejected one has, one half for a tie; of labelled
    responses by the sign of the reward."""

    @property
    def loss(self) -> float:
        """Mean loss, by the weights."""
        return sum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True)) / sum(self.weights)

    @property
    def accuracy(self) -> float:
        """Share of the pairs in order."""
        return sum(self.correct) / len(self.correct)

    def as_record(self) -> dict[str, object]:
        """Return the metrics as a row of `evals.jsonl`; `accuracy_low` and `accuracy_high` are Wilson's 95 %."""
        interval = wilson_interval(round(sum(self.correct)), len(self.margins))
        rewards = {"chosen_reward": self.chosen, "rejected_reward": self.rejected}
        return {
            "eval/loss": self.loss,
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": interval.low,
            "eval/accuracy_high": interval.high,
            "eval/margin": fmean(self.margins),
            **{f"eval/{name}": fmean(values) for name, values in rewards.items() if values},
            "eval/n": len(self.margins),
        }


@dataclass(frozen=True, slots=True)
class PairEvaluator:
    """Evaluator of held-out pairs under the policy as it is; every rank gets the result."""

    config: PreferenceLoss
    samples: Sequence[TrainingSample]
    """Chosen and rejected responses in turn."""
    score: Score
    reference: Callable[[], LogprobTable | None]
    """Log-probs of the reference of `samples`; None where the loss needs none."""

    def __call__(self) -> PreferenceResult:
        """Evaluate all pairs."""
        rows, table = self.score(self.samples), self.reference()
        parts: list[tuple[list[float], ...]] = []
        for start in range(0, len(self.samples), 2 * _CHUNK):
            chosen = range(start, min(start + 2 * _CHUNK, len(self.samples)))
            parts.append(self._of([_referred(self.samples[i], table, i) for i in chosen], [rows[i] for i in chosen]))
        joined = [tuple(x for part in column for x in part) for column in zip(*parts, strict=True)]
        losses, first, second, correct = joined
        margins = tuple(a - b for a, b in zip(first, second, strict=True))
        weights = tuple(sample.advantage for sample in self.samples[::2])
        return PreferenceResult(losses, weights, margins, first, second, correct)

    def _of(self, samples: Sequence[TrainingSample], rows: Sequence[Sequence[float]]) -> tuple[list[float], ...]:
        """Return losses, rewards and order of some pairs."""
        batch = pack(samples)
        of = pair_logprobs(batch, _flat(samples, rows))
        rewards = implicit_rewards(self.config, of)
        correct = pairs_in_order(self.config, of)
        return pair_losses(self.config, of).tolist(), rewards[0].tolist(), rewards[1].tolist(), correct.tolist()


@dataclass(frozen=True, slots=True)
class LabelledEvaluator:
    """Evaluator of held-out labelled responses (KTO); every rank gets the result."""

    config: PreferenceLoss
    samples: Sequence[TrainingSample]
    score: Score
    reference: Callable[[], LogprobTable | None]
    reference_point: Callable[[], float]
    """z of the held-out rows, in nats."""

    def __call__(self) -> PreferenceResult:
        """Evaluate all responses."""
        rows, table = self.score(self.samples), self.reference()
        batch = pack([replace(sample, unit="") for sample in self.samples])
        policy_S = sequence_sums(_flat(self.samples, rows), batch)
        referred = [[0.0] * len(row) if table is None else table.row(i) for i, row in enumerate(rows)]
        reference_S = sequence_sums(_flat(self.samples, referred), batch)
        signs = [sample.advantage for sample in self.samples]
        good_S = torch.tensor(signs) > 0
        losses_S = labelled_losses(self.config, policy_S, reference_S, good_S, self.reference_point())
        rewards_S = self.config.strength * (policy_S - reference_S)
        signed = torch.where(good_S, rewards_S, -rewards_S)
        return PreferenceResult(
            tuple(losses_S.tolist()),
            tuple(map(abs, signs)),
            tuple(signed.tolist()),
            tuple(rewards_S[good_S].tolist()),
            tuple(rewards_S[~good_S].tolist()),
            tuple(in_order(signed, torch.zeros_like(signed), self.config.strength * policy_S.abs()).tolist()),
        )


def _referred(sample: TrainingSample, table: LogprobTable | None, index: int) -> TrainingSample:
    return sample if table is None else replace(sample, reference_logprobs=table.row(index))


def _flat(samples: Sequence[TrainingSample], rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return [T] values of all tokens: 0 at the prompts, and a number at each response token."""
    values = [x for sample, row in zip(samples, rows, strict=True) for x in (*(0.0,) * sample.prompt_length, *row)]
    return torch.tensor(values, dtype=torch.float32)
