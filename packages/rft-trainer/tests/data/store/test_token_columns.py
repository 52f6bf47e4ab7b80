"""Samples as columns."""

from __future__ import annotations

from rft_trainer.data.store.token_columns import columns_of, joined, token_columns
from rft_trainer.records.rollouts import TrainingSample

SAMPLES = [
    TrainingSample("a:0", (5, 70000, 7), 1, 0.0),
    TrainingSample("a:1", (5, 6, 7, 8), 1, 0.0, loss_mask=(True, False, True), weight=0.5),
    TrainingSample("a:4", (9, 1), 0, 0.0),
    TrainingSample("a:5", (9, 1, 3), 0, 0.0, loss_mask=(True, False, True)),
    TrainingSample("a:6", (9, 1, 3), 2, 0.0, loss_mask=(True,)),
]


def test_tokens_in_the_loss_are_those_that_the_samples_count() -> None:
    for sample in SAMPLES:
        assert token_columns([(0, sample)]).num_loss_tokens == sample.num_loss_tokens
    every = token_columns(list(enumerate(SAMPLES)))
    assert every.num_loss_tokens == sum(sample.num_loss_tokens for sample in SAMPLES)
    assert columns_of([], [], [], [], []).num_loss_tokens == 0


def test_blocks_are_joined_in_their_order() -> None:
    whole = token_columns(list(enumerate(SAMPLES)))
    parts = joined([token_columns(list(enumerate(SAMPLES))[:2]), token_columns([(2, SAMPLES[2])])])
    assert parts.index.tolist() == [0, 1, 2]
    assert parts.token_ids.tolist() == whole.token_ids[:9].tolist()
    assert [parts.token_ids.dtype.name, parts.loss_mask.dtype.name] == ["uint32", "bool"]
