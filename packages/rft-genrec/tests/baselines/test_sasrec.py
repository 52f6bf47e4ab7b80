"""SASRec: it learns an order, its seed decides all, it is read as it was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rft_core.errors import DataError, OptionsError
from rft_genrec.baselines.named import fitted
from rft_genrec.baselines.sasrec import SasRec, SasRecTraining, train_sasrec
from rft_genrec.baselines.sasrec_model import SasRecNetwork, SasRecSizes

SIZES = SasRecSizes(num_items=6, hidden=16, layers=1, heads=2, max_history=4, dropout=0.1)
RING = [[(start + step) % 6 for step in range(5)] for start in range(6)] * 8
SHORT = SasRecTraining(epochs=12, batch_size=8, learning_rate=1e-2)


def test_it_learns_what_follows() -> None:
    model = train_sasrec(RING, SIZES, SHORT, seed=1)
    assert [one.items[0] for one in model.rank([[0, 1], [4], [2, 3, 4, 5]], 1)] == [2, 5, 0]
    assert model.score([0], 1) > 0.3
    assert model.scores([[0], [3, 4]]).sum(1) == pytest.approx(1.0)


def test_the_seed_decides_every_weight() -> None:
    once, again, other = (train_sasrec(RING[:12], SIZES, SasRecTraining(epochs=2), seed=seed) for seed in (1, 1, 2))
    weights = [model.network.state_dict()["items"] for model in (once, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_global_generator_has_no_part_in_it() -> None:
    before = torch.random.get_rng_state()
    train_sasrec(RING[:6], SIZES, SasRecTraining(epochs=1), seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_history_is_scored_alike_alone_and_beside_longer_ones() -> None:
    model = SasRec(SasRecNetwork(SIZES, seed=3))
    both = model.scores([[1], [], [0, 1, 2, 3, 4, 5]])
    assert np.allclose(both[0], model.scores([[1]])[0], atol=1e-6)
    assert np.allclose(both[2], model.scores([[2, 3, 4, 5]])[0], atol=1e-6)


def test_it_ends_after_epochs_without_gain() -> None:
    epochs: list[int] = []
    training = SasRecTraining(epochs=50, patience=2, learning_rate=0.0)
    train_sasrec(RING, SIZES, training, seed=1, report=lambda epoch, loss, gain: epochs.append(epoch))
    assert len(epochs) < 10


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = tmp_path / "sasrec"
    made = fitted("sasrec", RING, 6, seed=1, sasrec=str(place))
    assert sorted(file.name for file in place.iterdir()) == ["sasrec.json", "sasrec.safetensors"]
    read = fitted("sasrec", [], 6, seed=9, sasrec=str(place))
    assert np.array_equal(read.scores([[0, 1]]), made.scores([[0, 1]]))
    with pytest.raises(DataError, match="model of 6 items"):
        SasRec.load(place, num_items=7)
    (place / "sasrec.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError, match="cannot be read"):
        SasRec.load(place, num_items=6)


def test_without_two_items_there_is_nothing_to_learn() -> None:
    with pytest.raises(OptionsError, match="none of 2 sequences"):
        train_sasrec([[1], [2]], SIZES, seed=1)
