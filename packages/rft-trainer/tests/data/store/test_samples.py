"""Samples of a store as a sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.data.store.shards import write_shard
from rft_trainer.data.store.token_columns import token_columns
from rft_trainer.records.rollouts import TrainingSample

PLACE = {
    "num_rows": 3,
    "source": 0,
    "file": 0,
    "offset": 9,
    "line": 3,
    "index": 3,
    "too_long": (),
    "counts": {"weightless": 0},
}
SAMPLES = [
    TrainingSample("a:0", (5, 70000, 7), 1, 0.0),
    TrainingSample("a:1", (5, 6, 7, 8), 1, 0.0, loss_mask=(True, False, True), weight=0.5),
    TrainingSample("a:4", (9, 1), 0, 0.0),
    TrainingSample("b:0", (3, 1), 1, 0.0),
]


@pytest.fixture
def samples(tmp_path: Path) -> StoredSamples:
    """Four samples in two shards, of two sources."""
    rows = [(0, 0, SAMPLES[0]), (0, 1, SAMPLES[1]), (0, 4, SAMPLES[2]), (1, 0, SAMPLES[3])]
    blocks = [(source, token_columns([(index, sample)])) for source, index, sample in rows]
    shards = [write_shard(tmp_path, number, blocks[2 * number : 2 * number + 2], PLACE) for number in range(2)]
    return StoredSamples(tmp_path, shards, ["a", "b"])


def test_samples_come_back_as_they_were(samples: StoredSamples) -> None:
    assert (len(samples), list(samples), samples[-1], samples[1:3]) == (4, SAMPLES, SAMPLES[3], SAMPLES[1:3])
    assert samples.sizes(2) == (3, 1)
    with pytest.raises(IndexError):
        samples[4]


def test_some_of_them_are_a_sequence_too(samples: StoredSamples) -> None:
    some = samples.picked(iter([3, 1]))
    assert (len(some), list(some)) == (2, [SAMPLES[3], SAMPLES[1]])
    with pytest.raises(IndexError):
        some[2]
