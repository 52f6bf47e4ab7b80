"""Held-out preferences: loss, accuracy with ties and interval, margins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rft_algos.algorithms.preference import PreferenceLoss
from rft_trainer.evaluation.preferences import LabelledEvaluator, PairEvaluator, PreferenceResult
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.reference_logprobs import LogprobTable

PAIRS = [
    TrainingSample(f"p:{row}/{part}", (7, 8, 9), 1, weight, unit=f"p:{row}")
    for row, weight in enumerate((1.0, 3.0))
    for part in ("chosen", "rejected")
]
POLICY = [(-1.0, -1.0), (-2.0, -1.0), (-3.0, -2.0), (-1.0, -1.0)]
REFERENCE = LogprobTable.of(torch.tensor([-1.0, -2.0, -2.0, -2.0, -2.0, -2.0, -1.0, -1.0]), [2] * 4)


def score(samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
    return POLICY[: len(samples)]


def test_pairs_are_compared_by_their_rewards() -> None:
    result = PairEvaluator(PreferenceLoss(loss_type="hinge", beta=0.5), PAIRS, score, lambda: REFERENCE)()
    assert result.chosen == pytest.approx((0.5, -0.5))
    assert result.rejected == pytest.approx((0.5, 0.0))
    assert result.correct == (0.5, 0.0)
    assert result.losses == pytest.approx((1.0, 1.5))
    assert result.loss == pytest.approx((1.0 * 1 + 1.5 * 3) / 4)


def test_the_record_has_the_interval_of_the_accuracy() -> None:
    result = PreferenceResult((0.1,) * 4, (1.0,) * 4, (1.0, 2.0, -1.0, 0.0), (1.0,), (), (1.0, 1.0, 0.0, 0.5))
    record = result.as_record()
    assert record["eval/accuracy"] == 0.625
    low, high = record["eval/accuracy_low"], record["eval/accuracy_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert 0 < low < 0.625 < high < 1
    assert (record["eval/margin"], record["eval/n"]) == (0.5, 4)
    assert "eval/rejected_reward" not in record


def test_many_pairs_are_the_same_pairs_again_and_again() -> None:
    many = [sample for _ in range(300) for sample in PAIRS]
    table = LogprobTable.of(REFERENCE.values_N.repeat(300), [2] * len(many))
    result = PairEvaluator(PreferenceLoss(), many, lambda given: POLICY * 300, lambda: table)()
    one = PairEvaluator(PreferenceLoss(), PAIRS, score, lambda: REFERENCE)()
    assert len(result.losses) == 600
    assert result.loss == pytest.approx(one.loss)


def test_labelled_responses_are_right_by_the_sign_of_their_reward() -> None:
    samples = [TrainingSample(f"l:{i}", (7, 8, 9), 1, sign) for i, sign in enumerate((1.0, -1.0, 2.0, -2.0))]
    config = PreferenceLoss(loss_type="kto", beta=0.5)
    result = LabelledEvaluator(config, samples, score, lambda: REFERENCE, lambda: 0.0)()
    assert result.margins == pytest.approx((0.5, -0.5, -0.5, 0.0))
    assert result.correct == (1.0, 0.0, 0.0, 0.5)
    assert result.weights == (1.0, 1.0, 2.0, 2.0)
