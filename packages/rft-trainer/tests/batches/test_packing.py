"""Packing: the same tokens whatever the cut, balanced shares, caps that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_core.errors import OptionsError
from rft_trainer.batches.packing import (
    assign_to_ranks,
    count,
    pack,
    rank_micro_batches,
)
from rft_trainer.batches.units import split_by_tokens, split_in_order
from rft_trainer.records.rollouts import TrainingSample

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
    cuts = split_in_order(num_tokens, max_sequences, cap)
    assert [i for cut in cuts for i in cut] == list(range(len(num_tokens)))
    assert all(len(cut) <= max_sequences and sum(num_tokens[i] for i in cut) <= cap for cut in cuts)


@given(lengths, st.integers(40, 100))
def test_cuts_by_tokens_keep_the_cap_and_lose_nothing(num_tokens: list[int], cap: int) -> None:
    cuts = split_by_tokens(num_tokens, cap)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(num_tokens)))
    assert all(sum(num_tokens[i] for i in cut) <= cap for cut in cuts)


def test_a_sample_longer_than_the_cap_is_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(OptionsError) as caught:
        split_in_order([10, 70], 8, 64)
    assert caught.value.problem.do == "--max_tokens_per_micro_batch 70"


def test_a_sample_with_lists_of_the_wrong_length_says_both_lengths() -> None:
    with pytest.raises(ValueError, match="old_logprobs has 1 entries, 2 response tokens"):
        TrainingSample("s", (1, 2, 3), 1, 0.0, old_logprobs=(-1.0,))


FIELDS = (
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "token_advantages",
    "old_values",
    "returns",
    "token_weights",
    "selected",
)


def test_fields_that_no_sample_carries_are_none() -> None:
    batch = pack([TrainingSample("s", (1, 2, 3), 1, 0.5)])
    assert (batch.old_values_T, batch.returns_T, batch.token_weights_T) == (None, None, None)


def test_values_returns_and_weights_stand_at_the_response() -> None:
    first = TrainingSample(
        "s", (5, 6, 7, 8), 2, 0.5, old_values=(0.1, 0.2), returns=(1.0, 2.0), token_weights=(0.0, 3.0)
    )
    second = TrainingSample("t", (3, 4), 1, 0.5, old_values=(0.3,), returns=(3.0,), token_weights=(4.0,))
    batch = pack([first, second])
    for found, expected in (
        (batch.old_values_T, [0, 0, 0.1, 0.2, 0, 0.3]),
        (batch.returns_T, [0, 0, 1.0, 2.0, 0, 3.0]),
        (batch.token_weights_T, [0, 0, 0.0, 3.0, 0, 4.0]),
    ):
        assert found is not None
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0)


def test_a_sample_without_weights_beside_one_with_some_weighs_one() -> None:
    batch = pack([TrainingSample("s", (5, 6, 7), 1, 0.5), TrainingSample("t", (3, 4), 1, 0.5, token_weights=(0.25,))])
    assert batch.token_weights_T is not None
    assert batch.token_weights_T.tolist() == [0.0, 1.0, 1.0, 0.0, 0.25]


def test_advantages_of_tokens_take_the_place_of_the_sequences_number() -> None:
    by_token = TrainingSample("s", (5, 6, 7, 8), 2, 9.0, token_advantages=(0.5, -0.25))
    batch = pack([by_token, TrainingSample("t", (3, 4), 1, -2.0)])
    assert batch.advantages_T.tolist() == [0.0, 0.0, 0.5, -0.25, -2.0, -2.0]
    assert batch.advantages_T.dtype is torch.float32


@pytest.mark.parametrize("name", ["old_logprobs", "old_values", "returns"])
def test_a_field_that_some_samples_lack_is_a_mistake_of_the_caller(name: str) -> None:
    fields: dict[str, Any] = {name: (0.1, 0.2)}
    given = TrainingSample("s", (5, 6, 7), 1, 0.5, **fields)
    with pytest.raises(AssertionError, match=f"sample t has no {name}"):
        pack([given, TrainingSample("t", (3, 4), 1, 0.5)])
    batch = pack([given, TrainingSample("u", (3, 4), 2, 0.5)])  # no response, so nothing is missing
    found = getattr(batch, f"{name}_T")
    torch.testing.assert_close(found, torch.tensor([0, 0.1, 0.2, 0, 0]), rtol=0, atol=0)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_over_the_response_is_checked_for_its_length(name: str) -> None:
    fields: dict[str, Any] = {name: (1,)}
    with pytest.raises(ValueError, match=f"sample s: {name} has 1 entries, 2 response tokens"):
        TrainingSample("s", (1, 2, 3), 1, 0.0, **fields)


def test_a_sample_has_an_advantage_where_any_token_has() -> None:
    assert TrainingSample("s", (1, 2, 3), 1, 0.5).has_advantage
    assert not TrainingSample("s", (1, 2, 3), 1, 0.0).has_advantage
    assert TrainingSample("s", (1, 2, 3), 1, 0.0, token_advantages=(0.0, -1.0)).has_advantage
    assert not TrainingSample("s", (1, 2, 3), 1, 0.5, token_advantages=(0.0, 0.0)).has_advantage


@given(lengths, st.integers(1, 5), st.integers(1, 9))
def test_the_micro_batches_of_all_ranks_hold_every_sample_once(
    num_tokens: list[int], world_size: int, max_sequences: int
) -> None:
    samples = [TrainingSample(str(i), (1,) * length, 1, 0.0) for i, length in enumerate(num_tokens)]
    found = [
        sample.sample_id
        for rank in range(world_size)
        for chosen in rank_micro_batches(
            samples, rank, world_size, lambda sizes: split_in_order(sizes, max_sequences, 0)
        )
        for sample in chosen
    ]
    assert sorted(found, key=int) == [sample.sample_id for sample in samples]


def test_of_a_sample_that_marks_nothing_beside_one_that_does_no_token_is_selected() -> None:
    marked = TrainingSample("s", (5, 6, 7, 8), 2, 0.5, selected=(False, True))
    plain = TrainingSample("t", (3, 4, 5), 1, 0.5)
    selected_T = pack([marked, plain]).selected_T
    assert selected_T is not None
    assert selected_T.tolist() == [False, False, False, True, False, False, False]
    assert pack([plain]).selected_T is None
