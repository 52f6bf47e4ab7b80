"""The loss of steps: the same step however it is cut, its denominator over all steps, weights, and the first error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.units import MicroBatching
from rft_trainer.evaluation.step_evaluator import StepScoreEvaluator
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.step_loss import StepLoss, StepScoreObjective, first_errors

D = torch.float64


class StepScorer(nn.Module):
    """A number for the token before the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 9, dtype=D))

    def step_scores(self, tokens: PackedTokens) -> Tensor:
        return self.table[tokens.token_ids_T.roll(1)[tokens.targets_T]]


def sample(number: int, steps: list[tuple[int, float | None]], weight: float = 1.0) -> TrainingSample:
    """Steps of one token each and its separator 0, behind a prompt of two tokens."""
    mask = [learned for _, label in steps for learned in (False, label is not None)]
    labels = [value for _, label in steps for value in (0.0, label or 0.0)]
    tokens = (1, 2, *(token for step, _ in steps for token in (step, 0)))
    return TrainingSample(
        f"r:{number}", tokens, 2, 0.0, returns=tuple(labels), loss_mask=tuple(mask), weight=weight, unit=f"r:{number}"
    )


ROWS = [
    sample(0, [(3, 1.0), (4, 0.0), (5, 0.0)]),
    sample(1, [(6, 1.0)], weight=3.0),
    sample(2, [(8, 1.0), (7, 1.0), (3, 0.25), (6, None)]),
]


def gradient(micro: MicroBatching) -> tuple[Tensor, dict[str, float]]:
    model = StepScorer()
    updater = Updater(
        StepLoss(model, StepScoreObjective()),
        PlainOptimizer([model.table]),
        OneRank(),
        micro_batching=micro,
        learning_rate=float,
    )
    totals = MetricTotals()
    updater.forward_backward(ROWS, 0, totals)
    assert model.table.grad is not None
    return model.table.grad.clone(), totals.merged(OneRank())


def test_no_cut_changes_the_gradient_of_the_mean_over_all_steps() -> None:
    whole, metrics = gradient(MicroBatching(9, 0, by_tokens=False))
    for micro in (MicroBatching(1, 0, by_tokens=False), MicroBatching(9, 16, by_tokens=True)):
        cut, others = gradient(micro)
        assert torch.allclose(cut, whole, rtol=1e-12)
        assert others == pytest.approx(metrics)
    table = StepScorer().table
    steps = [(3, 1.0, 1.0), (4, 0.0, 1.0), (5, 0.0, 1.0), (6, 1.0, 3.0), (8, 1.0, 1.0), (7, 1.0, 1.0), (3, 0.25, 1.0)]
    ids, labels, weights = (torch.tensor(column) for column in zip(*steps, strict=True))
    losses = nn.functional.binary_cross_entropy_with_logits(table[ids], labels.to(D), reduction="none")
    loss = (weights * losses).sum() / weights.sum()
    loss.backward()
    assert table.grad is not None
    assert torch.allclose(table.grad, whole)
    assert metrics["rm/loss"] == pytest.approx(float(loss))


def test_metrics_count_steps_and_first_errors() -> None:
    _, metrics = gradient(MicroBatching(9, 0, by_tokens=False))
    # scores of the tokens 3 to 8: -0.25, 0, 0.25, 0.5, 0.75, 1; a score above 0 calls the step good
    assert metrics["rm/accuracy"] == pytest.approx(5 / 7)
    assert metrics["rm/first_error"] == pytest.approx(2 / 3)
    assert metrics["rm/step_label"] == pytest.approx(4.25 / 7)
    bad, rows = torch.tensor([False, True, True, False]), torch.tensor([0, 0, 1, 2])
    assert first_errors(bad, rows, 3).tolist() == [1, 2, 4]


def test_the_evaluation_is_of_the_labelled_steps() -> None:
    found = StepScoreEvaluator(
        model=StepScorer(), held_out=ROWS, collectives=OneRank(), max_sequences=1, max_tokens=0
    )()
    record = found.as_record()
    _, metrics = gradient(MicroBatching(9, 0, by_tokens=False))
    assert record["eval/loss"] == pytest.approx(metrics["rm/loss"])
    assert record["eval/accuracy"] == pytest.approx(metrics["rm/accuracy"])
    assert record["eval/first_error"] == pytest.approx(metrics["rm/first_error"])
    assert (record["eval/n"], record["eval/majority"]) == (7, pytest.approx(4 / 7))
    assert record["eval/f1"] == pytest.approx(2 * 0.5 / 1.5)
    assert sum(row["num"] for row in found.bins()) == 7
