"""Which sample goes where, to the rank and the place; fillers; and what a packed batch is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.batches import packing
from rft_trainer.batches.packing import (
    assign_to_ranks,
    count,
    filler_batches,
    num_filler_batches,
    pack,
    rank_micro_batches,
)
from rft_trainer.batches.units import split_by_tokens, split_in_order
from rft_trainer.records.rollouts import Counts, TrainingSample
from rft_trainer.testing.bigram import OneRank


class RankOf(OneRank):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def of_lengths(*lengths: int) -> list[TrainingSample]:
    return [TrainingSample(f"s{i}", (i + 1,) * length, 1, 0.0) for i, length in enumerate(lengths)]


def one_each(num_tokens: Any) -> list[list[int]]:
    return split_in_order(num_tokens, 1, 0)


def test_the_longest_goes_to_the_lightest_rank_and_ties_go_by_index_and_rank() -> None:
    assert assign_to_ranks([3, 9, 3, 4, 3], 2) == [[1, 4], [0, 2, 3]]
    assert assign_to_ranks([5, 5, 5, 5], 3) == [[0, 3], [1], [2]]
    assert assign_to_ranks([2], 3) == [[0], [], []]
    assert assign_to_ranks([], 2) == [[], []]
    # within a rank the given order is kept, not that of the lengths
    assert assign_to_ranks([1, 2, 3], 1) == [[0, 1, 2]]


def test_a_cut_in_order_is_closed_where_the_next_one_would_be_too_much() -> None:
    assert split_in_order([4, 3, 1, 6, 1], 9, 7) == [[0, 1], [2, 3], [4]]
    assert split_in_order([4, 3, 1, 6, 1], 2, 0) == [[0, 1], [2, 3], [4]]
    assert split_in_order([4, 3, 1, 6, 1], 9, 0) == [[0, 1, 2, 3, 4]]
    assert split_in_order([1, 1, 1, 7], 2, 7) == [[0, 1], [2], [3]]
    assert split_in_order([], 2, 7) == []


def test_a_cut_by_tokens_takes_the_earliest_that_has_room() -> None:
    assert split_by_tokens([2, 6, 5, 3, 4, 2], 8) == [[0, 1], [2, 3], [4, 5]]
    assert split_by_tokens([4, 4, 4], 8) == [[0, 1], [2]]
    assert split_by_tokens([1, 8], 8) == [[1], [0]]
    assert split_by_tokens([], 8) == []


@pytest.mark.parametrize("cut", [lambda sizes, cap: split_in_order(sizes, 9, cap), split_by_tokens])
def test_a_sample_may_have_as_many_tokens_as_the_cap_and_no_more(cut: Any) -> None:
    assert cut([7], 7) == [[0]]
    with pytest.raises(OptionsError) as caught:
        cut([2, 8], 7)
    assert caught.value.problem.code == "batch.sample_over_token_cap"


def test_ranks_cut_their_own_share() -> None:
    samples = of_lengths(3, 9, 3, 4, 3)
    names = [
        [[one.sample_id for one in chosen] for chosen in rank_micro_batches(samples, rank, 2, one_each)]
        for rank in range(2)
    ]
    assert names == [[["s1"], ["s4"]], [["s0"], ["s2"], ["s3"]]]


def test_fillers_make_up_for_the_rank_with_the_most_micro_batches() -> None:
    lengths = [3, 9, 3, 4, 3]
    assert [num_filler_batches(lengths, rank, 2, one_each) for rank in range(2)] == [1, 0]
    assert [num_filler_batches([9, 1, 1, 1], rank, 2, one_each) for rank in range(2)] == [2, 0]
    assert [num_filler_batches([4], rank, 3, one_each) for rank in range(3)] == [0, 1, 1]


def test_a_filler_is_the_shortest_sample() -> None:
    samples = of_lengths(3, 9, 2, 4, 3)
    [filler, same] = filler_batches(samples[1:2] + samples[:1] + samples[2:3] * 2, RankOf(0, 2), one_each, "cpu")
    assert filler.token_ids_T.tolist() == same.token_ids_T.tolist() == [3, 3]
    assert filler_batches(samples, RankOf(1, 2), one_each, "cpu") == []
    assert filler_batches([], RankOf(0, 2), one_each, "cpu") == []


def test_counts_are_of_tokens_in_the_loss() -> None:
    samples = [
        *of_lengths(2, 4),
        TrainingSample("prompt", (1, 2), 2, 0.0),
        TrainingSample("masked", (1, 2, 3), 1, 0.0, loss_mask=(False, False)),
    ]
    assert count(samples) == Counts(num_loss_tokens=4, num_sequences=2, num_units=len(samples))
    assert count([]) == Counts(0, 0)


def test_numbers_that_are_whole_are_packed_as_float32_too() -> None:
    whole = TrainingSample(
        "s", (1, 2, 3), 0, 1, old_logprobs=(-1, -2, -3), selected=(True, False, True), token_weights=(1, 2, 3)
    )
    batch = pack([whole])
    assert batch.advantages_T.dtype == torch.float32
    for field_T in (batch.old_logprobs_T, batch.token_weights_T):
        assert field_T is not None
        assert field_T.dtype == torch.float32
    by_token = pack([TrainingSample("s", (1, 2, 3), 0, 0.0, token_advantages=(1, 2, 3))])
    assert by_token.advantages_T.dtype == torch.float32
    assert batch.selected_T is not None
    assert batch.selected_T.tolist() == [True, False, True]


def test_each_field_of_the_response_comes_from_its_own() -> None:
    given = TrainingSample(
        "s",
        (5, 6, 7),
        1,
        0.5,
        behaviour_logprobs=(-1.0, -2.0),
        old_logprobs=(-3.0, -4.0),
        reference_logprobs=(-5.0, -6.0),
        old_values=(7.0, 8.0),
        returns=(9.0, 10.0),
    )
    batch = pack([given])
    fields = ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "old_values", "returns")
    rows = [getattr(batch, f"{name}_T").tolist() for name in fields]
    assert rows == [[0, -1, -2], [0, -3, -4], [0, -5, -6], [0, 7, 8], [0, 9, 10]]
    assert (batch.token_weights_T, batch.selected_T, batch.mm_inputs) == (None, None, None)


def test_a_sample_without_a_mask_beside_one_with_it_is_learned_whole() -> None:
    masked = TrainingSample("m", (1, 2, 3, 4), 1, 0.0, loss_mask=(True, False, True))
    batch = pack([masked, TrainingSample("s", (5, 6, 7), 1, 0.0)])
    assert batch.loss_mask_T.tolist() == [False, True, False, True, False, True, True]


def test_a_mask_cannot_bring_in_a_first_token() -> None:
    batch = pack([TrainingSample("m", (1, 2), 0, 0.0, loss_mask=(True, True))])
    assert batch.loss_mask_T.tolist() == [False, True]


def test_images_stand_at_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "load_media", lambda media: None if media is None else f"loaded {media}")
    samples = [TrainingSample("t", (1, 2), 1, 0.0), TrainingSample("i", (3, 4), 1, 0.0, media="a")]
    assert pack(samples).mm_inputs == (None, "loaded a")
    assert pack(samples).tokens.mm_inputs == (None, "loaded a")
    assert pack(samples[:1]).mm_inputs is None


def test_on_a_cpu_no_page_is_locked() -> None:
    batch = pack(of_lengths(3), "cpu", pin_memory=True)
    assert not batch.token_ids_T.is_pinned()
    assert batch.token_ids_T.device.type == "cpu"
