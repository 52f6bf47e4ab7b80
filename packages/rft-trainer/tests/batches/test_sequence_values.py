"""Sums over sequences and the two of a pair, from values of tokens."""

from __future__ import annotations

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.batches.packing import pack
from rft_trainer.batches.sequence_values import pair_values, sequence_sums
from rft_trainer.records.rollouts import TrainingSample


def sample(name: str, length: int, unit: str = "", prompt_length: int = 1) -> TrainingSample:
    return TrainingSample(name, tuple(range(1, 1 + prompt_length + length)), prompt_length, 0.0, unit=unit)


def test_a_sequence_is_the_sum_of_its_loss_tokens() -> None:
    batch = pack([sample("a", 2), sample("b", 1, prompt_length=2), sample("c", 3)])
    values = torch.arange(10.0, requires_grad=True)
    sums = sequence_sums(values, batch)
    assert sums.tolist() == [1.0 + 2.0, 5.0, 7.0 + 8.0 + 9.0]
    sums[2].backward()
    assert values.grad is not None
    assert values.grad.nonzero()[:, 0].tolist() == [7, 8, 9]


def test_sequences_without_a_loss_token_sum_to_0() -> None:
    batch = pack([sample("a", 2), sample("b", 0, prompt_length=2)])
    assert sequence_sums(torch.ones(5), batch).tolist() == [2.0, 0.0]


def test_pairs_are_chosen_then_rejected() -> None:
    batch = pack([sample(f"{unit}{i}", 1, unit) for unit in "xy" for i in range(2)])
    chosen, rejected = pair_values(torch.tensor([1.0, 2.0, 3.0, 4.0]), batch)
    assert (chosen.tolist(), rejected.tolist()) == ([1.0, 3.0], [2.0, 4.0])


@pytest.mark.parametrize("units", ["", "xxx", "xxyyy"])
def test_units_that_are_no_pairs_are_refused(units: str) -> None:
    batch = pack([sample(f"s{i}", 1, unit) for i, unit in enumerate(units or ["", ""])])
    with pytest.raises(OptionsError) as caught:
        pair_values(torch.zeros(len(units) or 2), batch)
    assert caught.value.problem.code == "batch.no_pairs"
