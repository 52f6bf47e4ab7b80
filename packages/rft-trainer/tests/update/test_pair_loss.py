"""The loss of pairs: the same step however it is cut, its denominator, ties, heads, centring and weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_trainer.batches.packing import count, pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.pairs import PairLabel, PairLabels
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import OneRank, PlainOptimizer, TokenScorer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.pair_loss import PairLoss, PairScoreObjective

VOCAB, D = 7, torch.float64


def pair(number: int, label: PairLabel) -> list[TrainingSample]:
    """Two texts of one prompt, of different lengths."""
    rows = [(1, 2, 3 + number % 4), (1, 2, 4 + number % 3, 5)]
    return [
        TrainingSample(f"p:{number}/{k}", row, 2, 0.0, unit=f"p:{number}", sequence_numbers=label.as_numbers())
        for k, row in enumerate(rows)
    ]


def samples(heads: int = 1) -> list[TrainingSample]:
    outcomes = [(1.0,), (-1.0,), (0.0,), (1.0,), (2.0,)]
    labels = [
        PairLabel(tuple(outcomes[(n + k) % 5][0] for k in range(heads)), margin=0.1 * n, weight=1.0 + n)
        for n in range(5)
    ]
    return [sample for n, label in enumerate(labels) for sample in pair(n, label)]


def gradient(objective: PairScoreObjective, micro: MicroBatching) -> tuple[Tensor, dict[str, float]]:
    model = TokenScorer(VOCAB, heads=len(objective.heads), dtype=D)
    updater = Updater(
        PairLoss(model, objective), PlainOptimizer([model.table]), OneRank(), micro_batching=micro, learning_rate=float
    )
    totals = MetricTotals()
    updater.forward_backward(samples(len(objective.heads)), 0, totals)
    assert model.table.grad is not None
    return model.table.grad.clone(), totals.merged(OneRank())


OBJECTIVES = [
    PairScoreObjective(tie_margin=0.5),
    PairScoreObjective(tie_margin=0.5, centring=0.01, heads=("a", "b")),
    PairScoreObjective(loss_type="hps"),
    PairScoreObjective(loss_type="logexp", centring=0.1),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("micro", [MicroBatching(1, 0, False), MicroBatching(2, 0, False), MicroBatching(9, 16, True)])
def test_no_cut_of_the_step_changes_gradient_or_metrics(objective: PairScoreObjective, micro: MicroBatching) -> None:
    whole, expected = gradient(objective, MicroBatching(100, 0, False))
    found, metrics = gradient(objective, micro)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)
    assert metrics == pytest.approx(expected, rel=1e-12)


def numbers(*labels: PairLabel) -> PairLabels:
    return PairLabels.of(torch.tensor([label.as_numbers() for label in labels], dtype=D))


def test_losses_are_those_of_the_equations() -> None:
    first, second = torch.tensor([[1.0], [1.0], [1.0], [1.0]], dtype=D), torch.tensor([[0.0]] * 4, dtype=D)
    labels = numbers(
        PairLabel((1.0,), margin=0.25), PairLabel((-1.0,)), PairLabel((0.0,), weight=3.0), PairLabel((2.0,), weight=9.0)
    )
    found = PairScoreObjective(tie_margin=0.5).losses(first, second, labels)[:, 0].tolist()

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    tie = -(math.log(math.e - 1) + log_sigmoid(0.5) + log_sigmoid(-1.5))
    assert found == pytest.approx([-log_sigmoid(0.25), -log_sigmoid(-1.5), 3 * tie, 0.0])


def test_without_a_margin_the_three_losses_are_one_function() -> None:
    first, second = torch.tensor([[0.3, -2.0]], dtype=D), torch.tensor([[0.1, 4.0]], dtype=D)
    labels = numbers(PairLabel((1.0, -1.0)))
    sigmoid = PairScoreObjective().losses(first, second, labels)
    for other in ("hps", "logexp"):
        torch.testing.assert_close(PairScoreObjective(loss_type=other).losses(first, second, labels), sigmoid)


def test_the_denominator_is_the_pairs_of_the_step_and_metrics_count_decided_labels() -> None:
    chosen = samples()
    batch, counts = pack(chosen), count(chosen)
    scores = torch.arange(10, dtype=D)[:, None]
    output = PairScoreObjective(tie_margin=0.5)(batch, scores, counts)
    labels = PairLabels.of(batch.sequence_numbers_SN[0::2])  # type: ignore[index]
    losses = PairScoreObjective(tie_margin=0.5).losses(scores[0::2], scores[1::2], labels)
    assert float(output.loss) == pytest.approx(float(losses.sum()) / 5)
    metrics = {name: float(total / parts) for name, (total, parts) in output.metrics.items()}
    # the second score is always the higher by one, and in one of three decided pairs the second is the better
    assert metrics["rm/accuracy"] == pytest.approx(1 / 3)
    assert metrics["rm/margin"] == pytest.approx(-1 / 3)
    assert metrics["rm/tied"] == pytest.approx(1 / 4)


def test_the_centring_penalty_pulls_both_scores_to_zero() -> None:
    first = torch.tensor([[3.0]], dtype=D, requires_grad=True)
    second = torch.tensor([[3.0]], dtype=D, requires_grad=True)
    PairScoreObjective(centring=1.0).losses(first, second, numbers(PairLabel((1.0,)))).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    # without it the gradients of both add up to 0
    assert float(first.grad + second.grad) == pytest.approx(2 * 2 * 6.0)


def test_fillers_have_a_gradient_path_and_no_metrics() -> None:
    model = TokenScorer(VOCAB, heads=1, dtype=D)
    loss = PairLoss(model, PairScoreObjective())
    assert loss.filler(pack(samples())).requires_grad
