"""Evaluation on held-out pairs: accuracy with its interval, calibration, and the same numbers on several ranks."""

from __future__ import annotations

import pytest
import torch

from rft_algos.statistics import wilson_interval
from rft_trainer.evaluation.pair_evaluator import PairEvaluation, PairScoreEvaluator
from rft_trainer.records.pairs import PairLabel, PairLabels
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import OneRank, TokenScorer
from rft_trainer.update.pair_loss import PairScoreObjective

D = torch.float64


def evaluation(scores: list[tuple[float, float]], outcomes: list[float]) -> PairEvaluation:
    first, second = (torch.tensor(column, dtype=D)[:, None] for column in zip(*scores, strict=True))
    labels = PairLabels.of(torch.tensor([PairLabel((one,)).as_numbers() for one in outcomes], dtype=D))
    objective = PairScoreObjective(tie_margin=0.5 if 0.0 in outcomes else 0.0)
    return PairEvaluation(("score",), first, second, labels, objective.losses(first, second, labels))


def test_accuracy_counts_decided_pairs_and_has_its_interval() -> None:
    found = evaluation([(2, 1), (1, 2), (0, 0), (1, 3), (1, 1)], [1, -1, 1, 1, 0]).as_record()
    assert found["eval/accuracy"] == 0.5, "equal scores are not right"
    assert found["eval/n"] == 4
    interval = wilson_interval(2, 4)
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == (interval.low, interval.high)


def test_a_model_that_is_as_sure_as_it_is_right_is_calibrated() -> None:
    sure = torch.tensor(0.75).logit().item()
    right = evaluation([(sure, 0.0)] * 4, [1, 1, 1, -1])
    assert right.as_record()["eval/calibration_error"] == pytest.approx(0, abs=1e-6)
    wrong = evaluation([(9.0, 0.0)] * 4, [1, 1, -1, -1])
    assert wrong.as_record()["eval/calibration_error"] == pytest.approx(0.5, abs=1e-3)
    assert [row["num"] for row in wrong.bins()] == [4]


def test_heads_have_accuracies_of_their_own() -> None:
    first, second = torch.tensor([[1.0, 1.0]], dtype=D), torch.tensor([[0.0, 2.0]], dtype=D)
    labels = PairLabels.of(torch.tensor([PairLabel((1.0, 1.0)).as_numbers()], dtype=D))
    found = PairEvaluation(("a", "b"), first, second, labels, first * 0).as_record()
    assert (found["eval/accuracy"], found["eval/accuracy_a"], found["eval/accuracy_b"]) == (0.5, 1.0, 0.0)


class RankOf(OneRank):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def held_out() -> list[TrainingSample]:
    rows = [((1, 2, 3), (1, 2, 4, 4)), ((1, 5), (1, 3, 3, 3)), ((2, 2), (2, 4))]
    label = PairLabel((1.0,)).as_numbers()
    return [
        TrainingSample(f"p:{n}/{k}", row, 1, 0.0, unit=f"p:{n}", sequence_numbers=label)
        for n, both in enumerate(rows)
        for k, row in enumerate(both)
    ]


def test_ranks_score_each_pair_once() -> None:
    model = TokenScorer(6, dtype=D)

    def scores(ranks: OneRank) -> torch.Tensor:
        found = PairScoreEvaluator(model, PairScoreObjective(), held_out(), ranks, max_sequences=1, max_tokens=0)()
        return torch.cat([found.first_PK, found.second_PK], dim=1)

    parts = [scores(RankOf(rank, 2)) for rank in (0, 1)]
    assert torch.equal(parts[0] + parts[1], scores(OneRank()))
    assert bool(((parts[0] == 0) | (parts[1] == 0)).all())


def test_the_model_is_in_evaluation_mode_while_it_scores_and_trains_afterwards() -> None:
    model = TokenScorer(6, dtype=D)
    seen: list[bool] = []
    original = model.score_matrix
    model.score_matrix = lambda tokens: (seen.append(model.training), original(tokens))[1]  # type: ignore[method-assign]
    PairScoreEvaluator(model, PairScoreObjective(), held_out(), OneRank(), max_sequences=9, max_tokens=0)()
    assert seen == [False]
    assert model.training
