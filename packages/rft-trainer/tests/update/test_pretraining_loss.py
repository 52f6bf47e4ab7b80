"""The pre-training term: coefficient times the mean over all rows of the step, whatever the micro-batches."""

from __future__ import annotations

import pytest
import torch

from rft_trainer.batches.packing import pack
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.update.pretraining_loss import PretrainingLikelihood

SAMPLES = [
    TrainingSample("a", (5, 6, 7, 8), 2, 0.0),
    TrainingSample("b", (5, 6), 1, 0.0),
    TrainingSample("t", (3, 4), 0, 0.0),
]
LOGPROBS = torch.tensor([0.0, -9.0, -1.0, -2.0, 0.0, -4.0, 0.0, -5.0], dtype=torch.float64)
COUNTS = TrainingBatch.of(SAMPLES).counts


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_loss_is_the_coefficient_times_the_mean_loss_of_a_response_token(coefficient: float) -> None:
    objective = PretrainingLikelihood(coefficient)
    found = objective(pack(SAMPLES), LOGPROBS, None, COUNTS)
    # of the text every token that can be predicted, of the demonstrations their responses
    assert float(found.loss) == pytest.approx(coefficient * (1 + 2 + 4 + 5) / 4)
    total, count = found.metrics["ptx/loss"]
    assert float(total / count) == pytest.approx((1 + 2 + 4 + 5) / 4)
    assert list(found.metrics) == ["ptx/loss"]


def test_shares_of_micro_batches_add_up_to_the_loss() -> None:
    objective = PretrainingLikelihood(0.5)
    parts = [(SAMPLES[:1], LOGPROBS[:4]), (SAMPLES[1:], LOGPROBS[4:])]
    losses = [float(objective(pack(samples), logprobs, None, COUNTS).loss) for samples, logprobs in parts]
    assert sum(losses) == pytest.approx(float(objective(pack(SAMPLES), LOGPROBS, None, COUNTS).loss))


def test_token_losses_are_the_same_loss_token_by_token() -> None:
    objective, batch = PretrainingLikelihood(0.5), pack(SAMPLES)
    tokens = batch.loss_mask_T.nonzero().flatten()
    shares = objective.token_losses(batch, COUNTS)(LOGPROBS[tokens], LOGPROBS[tokens], tokens)
    assert float(shares.sum()) == pytest.approx(float(objective(batch, LOGPROBS, None, COUNTS).loss))
