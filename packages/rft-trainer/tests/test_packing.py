"""Packing: the same tokens whatever the cut, balanced shares, caps that are kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.errors import OptionsError
from rft_trainer.packing import assign_to_ranks, count, cut_by_tokens, cut_in_order, pack
from rft_trainer.records import TrainingSample

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def sample(prompt: tuple[int, ...], response: tuple[int, ...], advantage: float = 1.0) -> TrainingSample:
    logprobs = tuple(-0.1 * token for token in response)
    return TrainingSample(
        "s", prompt + response, len(prompt), advantage, behaviour_logprobs=logprobs, old_logprobs=logprobs
    )


def test_packed_tensors_hold_each_sample_in_its_own_segment() -> None:
    batch = pack([sample((5, 6), (7, 8, 9), 0.5), sample((3,), (4,), -2.0)])
    assert batch.token_ids_T.tolist() == [5, 6, 7, 8, 9, 3, 4]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.segment_ids_T.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert batch.loss_mask_T.tolist() == [False, False, True, True, True, False, True]
    assert batch.advantages_T.tolist() == [0.5] * 5 + [-2.0] * 2
    assert batch.old_logprobs_T is not None
    torch.testing.assert_close(batch.old_logprobs_T, torch.tensor([0, 0, -0.7, -0.8, -0.9, 0, -0.4]))
    assert batch.reference_logprobs_T is None


def test_the_first_token_of_a_sequence_without_prompt_is_not_learned() -> None:
    batch = pack([TrainingSample("s", (4, 5, 6), 0, 1.0)])
    assert batch.loss_mask_T.tolist() == [False, True, True]
    assert count([TrainingSample("s", (4, 5, 6), 0, 1.0)]).num_loss_tokens == 2


def test_counts_leave_out_sequences_with_nothing_to_learn() -> None:
    counts = count([sample((1, 2), (3,)), TrainingSample("empty", (1, 2), 2, 1.0)])
    assert (counts.num_loss_tokens, counts.num_sequences) == (1, 1)


@given(lengths, st.integers(1, 8))
def test_every_sample_goes_to_exactly_one_rank_and_loads_differ_by_one_sample_at_most(
    num_tokens: list[int], world_size: int
) -> None:
    shares = assign_to_ranks(num_tokens, world_size)
    assert sorted(i for share in shares for i in share) == list(range(len(num_tokens)))
    loads = [sum(num_tokens[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(num_tokens)


@given(lengths, st.integers(1, 9), st.integers(40, 100))
def test_cuts_in_order_keep_both_caps_and_lose_nothing(num_tokens: list[int], max_sequences: int, cap: int) -> None:
    cuts = cut_in_order(num_tokens, max_sequences, cap)
    assert [i for cut in cuts for i in cut] == list(range(len(num_tokens)))
    assert all(len(cut) <= max_sequences and sum(num_tokens[i] for i in cut) <= cap for cut in cuts)


@given(lengths, st.integers(40, 100))
def test_cuts_by_tokens_keep_the_cap_and_lose_nothing(num_tokens: list[int], cap: int) -> None:
    cuts = cut_by_tokens(num_tokens, cap)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(num_tokens)))
    assert all(sum(num_tokens[i] for i in cut) <= cap for cut in cuts)


def test_a_sample_longer_than_the_cap_is_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(OptionsError) as caught:
        cut_in_order([10, 70], 8, 64)
    assert caught.value.problem.do == "--max_tokens_per_micro_batch 70"


def test_a_sample_with_lists_of_the_wrong_length_says_both_lengths() -> None:
    with pytest.raises(ValueError, match="old_logprobs has 1 entries, 2 response tokens"):
        TrainingSample("s", (1, 2, 3), 1, 0.0, old_logprobs=(-1.0,))
