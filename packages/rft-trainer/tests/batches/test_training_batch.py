"""A batch carries its samples and their denominators through every change that a loop makes to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.records.rollouts import Counts, TrainingSample


def sample(name: str, advantage: float = 1.0, length: int = 2, unit: str = "") -> TrainingSample:
    return TrainingSample(name, tuple(range(1, 2 + length)), 1, advantage, unit=unit)


BATCH = TrainingBatch.of([sample("a"), sample("b", 0.0, 3), sample("c", -1.0, 1)], temperature=0.5)


def names(batch: TrainingBatch) -> list[str]:
    return [one.sample_id for one in batch]


def test_a_batch_counts_its_own_samples() -> None:
    assert BATCH.counts == Counts(6, 3, 3)
    assert (len(BATCH), BATCH.num_tokens, BATCH.temperature) == (3, 9, 0.5)


def test_samples_without_an_advantage_need_no_forward_and_stay_in_the_counts() -> None:
    left = BATCH.without_zero_advantages()
    assert names(left) == ["a", "c"]
    assert (left.counts, left.temperature) == (BATCH.counts, 0.5)
    by_token = TrainingSample("d", (1, 2, 3), 1, 1.0, token_advantages=(0.0, 0.0))
    assert names(TrainingBatch.of([by_token]).without_zero_advantages()) == []


def test_log_probs_reach_the_response_tokens_of_their_samples() -> None:
    values = torch.arange(9.0)
    batch = BATCH.with_logprobs(old=values, reference=[(1.0, 2.0), (3.0, 4.0, 5.0), (6.0,)])
    assert [one.old_logprobs for one in batch] == [(1.0, 2.0), (4.0, 5.0, 6.0), (8.0,)]
    assert [one.reference_logprobs for one in batch] == [(1.0, 2.0), (3.0, 4.0, 5.0), (6.0,)]
    assert [row.tolist() for row in batch.rows(values)] == [[1.0, 2.0], [4.0, 5.0, 6.0], [8.0]]
    assert [one.old_logprobs for one in batch.with_logprobs(reference=values)] == [(1.0, 2.0), (4.0, 5.0, 6.0), (8.0,)]


def test_advantages_are_one_a_sample() -> None:
    batch = BATCH.with_advantages(torch.tensor([0.5, 0.25, 0.0]))
    assert [one.advantage for one in batch] == [0.5, 0.25, 0.0]
    assert batch.counts == BATCH.counts


def test_a_batch_is_cut_into_whole_units_with_counts_of_their_own() -> None:
    pairs = TrainingBatch.of([sample(f"{unit}{i}", length=i + 1, unit=unit) for unit in "xyz" for i in range(2)])
    parts = pairs.split(2)
    assert [names(part) for part in parts] == [["x0", "x1", "y0", "y1"], ["z0", "z1"]]
    assert [part.counts for part in parts] == [Counts(6, 4, 2), Counts(3, 2, 1)]
    assert [part.temperature for part in BATCH.split(2)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("wrong", "code", "shown"),
    [
        (lambda: BATCH.with_logprobs(old=torch.zeros(8)), "batch.logprobs", "[T] = [9]"),
        (lambda: BATCH.with_logprobs(reference=[(1.0,), (1.0,), (1.0,)]), "batch.logprobs", "2, 3, 1 response tokens"),
        (lambda: BATCH.rows(torch.zeros(9, 1)), "batch.logprobs", "(9, 1)"),
        (lambda: BATCH.with_advantages([1.0, 2.0]), "batch.advantages", "2 finite advantages for 3 samples"),
        (lambda: BATCH.with_advantages([1.0, 2.0, math.nan]), "batch.advantages", "2 finite advantages for 3"),
        (lambda: BATCH.split(0), "batch.split", "split(0)"),
    ],
)
def test_numbers_that_do_not_fit_the_batch_are_refused(wrong: Callable[[], object], code: str, shown: str) -> None:
    with pytest.raises(OptionsError) as caught:
        wrong()
    assert caught.value.problem.code == code
    assert shown in caught.value.problem.what
