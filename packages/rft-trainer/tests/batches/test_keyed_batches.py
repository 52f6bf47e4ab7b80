"""Rows by the number of an update: each once an epoch, the same whatever was drawn before."""

from __future__ import annotations

from collections import Counter

from rft_trainer.batches.keyed_batches import KeyedBatches
from rft_trainer.records.rollouts import TrainingSample

SAMPLES = [TrainingSample(f"r:{n}", (1, 2, 3), 1, 0.0) for n in range(5)]


def batches() -> KeyedBatches:
    # every epoch begins one row later
    return KeyedBatches(SAMPLES, lambda epoch: [(n + epoch) % 5 for n in range(5)], 2)


def names(number: int) -> list[str]:
    return [sample.sample_id for sample in batches().batch(number)]


def test_epochs_follow_one_another_across_batches() -> None:
    assert [names(number) for number in range(4)] == [
        ["r:0", "r:1"],
        ["r:2", "r:3"],
        ["r:4", "r:1"],
        ["r:2", "r:3"],
    ]
    assert Counter(name for number in range(5) for name in names(number)) == dict.fromkeys(
        names(0) + names(1) + ["r:4"], 2
    )


def test_a_batch_follows_from_its_number_alone_and_has_counts_of_its_own() -> None:
    rows = batches()
    late = rows.batch(7)
    assert batches().batch(7) == late
    assert (late.counts.num_sequences, late.counts.num_loss_tokens) == (2, 4)
