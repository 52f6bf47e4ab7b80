"""Evaluation of a reward model on held-out pairs: how often it prefers the better response, and how well it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rft_algos.statistics import CalibrationBin, calibration_curve, calibration_error, wilson_interval
from rft_trainer.batches.packing import assign_to_ranks, filler_batches, pack
from rft_trainer.batches.units import split_in_order, unit_lengths, units_of
from rft_trainer.protocols import Collectives, ScoringModel
from rft_trainer.records.pairs import PairLabels, head_names
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.update.pair_loss import PairScoreObjective


@dataclass(frozen=True, slots=True)
class PairEvaluation:
    """Scores of held-out pairs beside their labels."""

    heads: tuple[str, ...]
    first_PK: Tensor
    second_PK: Tensor
    labels: PairLabels
    losses_PK: Tensor

    @property
    def loss(self) -> float:
        """Mean loss of a pair."""
        return float(self.losses_PK.sum() / len(self.losses_PK))

    @property
    def right_PK(self) -> Tensor:
        """Bool: the better response of a decided pair has the higher score; equal scores are not right."""
        better_PK, worse_PK = self.labels.better_first(self.first_PK, self.second_PK)
        return (better_PK > worse_PK) & self.labels.decided_PK

    def calibration(self) -> list[CalibrationBin]:
        """Compare how sure the model is of the response that it prefers with how often that one is the better.

        The probability is sigmoid(|s_1 - s_2|), in [0.5, 1]; ten bins.
        """
        decided_PK = self.labels.decided_PK
        sure = (self.first_PK - self.second_PK).abs().sigmoid()[decided_PK].clamp(0.5, 1.0)
        return calibration_curve(sure.tolist(), self.right_PK[decided_PK].tolist(), low=0.5)

    def as_record(self) -> dict[str, object]:
        """Return the numbers by metric name; `eval/n` counts decided labels."""
        record: dict[str, object] = {"eval/loss": self.loss}
        decided_PK, right_PK = self.labels.decided_PK, self.right_PK
        if bool(decided_PK.any()):
            record |= _accuracy("eval/accuracy", right_PK[decided_PK])
            record["eval/n"] = int(decided_PK.sum())
            record["eval/calibration_error"] = calibration_error(self.calibration())
            better_PK, worse_PK = self.labels.better_first(self.first_PK, self.second_PK)
            record["eval/margin"] = float((better_PK - worse_PK)[decided_PK].mean())
        if len(self.heads) > 1:
            for column, name in enumerate(head_names(self.heads, "eval/accuracy")):
                chosen = decided_PK[:, column]
                record |= _accuracy(name, right_PK[:, column][chosen]) if bool(chosen.any()) else {}
        return record

    def bins(self) -> list[dict[str, float]]:
        """Return the calibration curve as rows of a file."""
        return [asdict(one) for one in self.calibration()]


def _accuracy(name: str, right_N: Tensor) -> dict[str, object]:
    """Return a share with the ends of its 95 % interval (Wilson)."""
    interval = wilson_interval(int(right_N.sum()), len(right_N))
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


class PairScoreEvaluator:
    """Evaluator of one reward model on held-out pairs, which are divided among the ranks."""

    def __init__(
        self,
        model: ScoringModel,
        objective: PairScoreObjective,
        held_out: Sequence[TrainingSample],
        collectives: Collectives,
        *,
        max_sequences: int,
        max_tokens: int,
        device: str = "cpu",
        collective_forward: bool = False,
    ) -> None:
        """Store the model, the pairs, and the limits of a forward.

        Args:
            model: the reward model.
            objective: of the loss; its heads name the scores.
            held_out: both responses of every pair, one pair after another; the same on every rank.
            collectives: the ranks that pairs are divided among.
            max_sequences: pairs in a forward.
            max_tokens: tokens in a forward; 0 = no limit.
            device: where the model computes.
            collective_forward: every forward is a collective operation, so all ranks run equally many.
        """
        self._model = model
        self._objective = objective
        self._held_out = held_out
        self._collectives = collectives
        self._limits = (max_sequences, max_tokens)
        self._device = device
        self._collective_forward = collective_forward

    def __call__(self) -> PairEvaluation:
        """Score every pair in evaluation mode; every rank gets all scores."""
        self._model.train(False)
        try:
            scores_PRK = self._scores()
        finally:
            self._model.train()
        first_PK, second_PK = scores_PRK.unbind(1)
        numbers = [sample.sequence_numbers for sample in self._held_out[0::2]]
        labels = PairLabels.of(torch.tensor(numbers, dtype=torch.float64))
        losses_PK = self._objective.losses(first_PK, second_PK, labels)
        return PairEvaluation(self._objective.heads, first_PK, second_PK, labels, losses_PK)

    @torch.no_grad()
    def _scores(self) -> Tensor:
        """[P, 2, K] float64: the scores of both responses of every pair."""
        ranks, units = self._collectives, units_of(self._held_out)
        share = assign_to_ranks(unit_lengths(units), ranks.world_size)[ranks.rank]
        scores_PRK = torch.zeros(len(units), 2, len(self._objective.heads), dtype=torch.float64)
        for cut in self._cut([unit_lengths(units)[index] for index in share]):
            chosen = [share[number] for number in cut]
            batch = pack([sample for index in chosen for sample in units[index]], self._device)
            scores_SK = self._model.score_matrix(batch.tokens).detach().double().cpu()
            scores_PRK[chosen] = scores_SK.unflatten(0, (len(chosen), 2))
        if self._collective_forward:
            for batch in filler_batches(self._held_out, ranks, self._cut, self._device):
                self._model.score_matrix(batch.tokens)
        # zeros where another rank has the pair, so that the sum has the bits of the rank that scored it
        return ranks.sum(scores_PRK) if ranks.world_size > 1 else scores_PRK

    def _cut(self, num_tokens: Sequence[int]) -> list[list[int]]:
        return split_in_order(num_tokens, *self._limits)
