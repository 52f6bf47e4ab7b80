from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.losses.aggregation import (
    fixed_length,
    prompt_mean_token_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
    weighted_sum,
)

# one row a sequence, one (kept, value) a token; a row may have no kept token
SEQUENCES = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-5, 5)), min_size=1, max_size=6), min_size=1, max_size=6
)
Rows = list[list[tuple[bool, float]]]
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MAX_TOKENS = 11


def pack(rows: Rows) -> Packed:
    flat = [(kept, index, value) for index, row in enumerate(rows) for kept, value in row]
    return (
        torch.tensor([kept for kept, _, _ in flat]),
        torch.tensor([index for _, index, _ in flat]),
        torch.tensor([value for _, _, value in flat], dtype=torch.float64),
    )


def counts(rows: Rows) -> tuple[int, int]:
    return sum(kept for row in rows for kept, _ in row), len(rows)


def kept_values(row: list[tuple[bool, float]]) -> list[float]:
    return [value for kept, value in row if kept]


def plain_token_mean(rows: Rows) -> float:
    values = [value for row in rows for value in kept_values(row)]
    return math.fsum(values) / len(values) if values else 0.0


def plain_sequence_mean_token_mean(rows: Rows) -> float:
    means = [math.fsum(kept_values(row)) / len(kept_values(row)) if kept_values(row) else 0.0 for row in rows]
    return math.fsum(means) / len(rows)


def plain_sequence_mean_token_sum(rows: Rows) -> float:
    return math.fsum(value for row in rows for value in kept_values(row)) / len(rows)


def plain_fixed_length(rows: Rows) -> float:
    return plain_sequence_mean_token_sum(rows) / MAX_TOKENS


Weights = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
ALL: dict[str, tuple[Weights, Callable[[Rows], float]]] = {
    "token_mean": (lambda m, s, tokens, n: token_mean(m, tokens, dtype=torch.float64), plain_token_mean),
    "sequence_mean_token_mean": (
        lambda m, s, tokens, n: sequence_mean_token_mean(m, s, n, dtype=torch.float64),
        plain_sequence_mean_token_mean,
    ),
    "sequence_mean_token_sum": (
        lambda m, s, tokens, n: sequence_mean_token_sum(m, n, dtype=torch.float64),
        plain_sequence_mean_token_sum,
    ),
    "fixed_length": (
        lambda m, s, tokens, n: fixed_length(m, n, MAX_TOKENS, dtype=torch.float64),
        plain_fixed_length,
    ),
}
every_reduction = pytest.mark.parametrize("name", ALL)


def test_hand_computed_values_of_two_sequences_of_one_and_three_tokens():
    mask, ids, values = pack([[(False, 9.0), (True, 4.0)], [(True, 1.0), (True, 2.0), (True, 3.0)]])
    found = {name: float(weighted_sum(weights(mask, ids, 4, 2), values)) for name, (weights, _) in ALL.items()}
    assert found == pytest.approx(
        {
            "token_mean": 10 / 4,
            "sequence_mean_token_mean": (4 + 2) / 2,
            "sequence_mean_token_sum": (4 + 6) / 2,
            "fixed_length": (4 + 6) / 2 / 11,
        }
    )


@every_reduction
@given(rows=SEQUENCES)
def test_equals_a_plain_twin_on_ragged_sequences(name: str, rows: Rows):
    weights, plain = ALL[name]
    mask, ids, values = pack(rows)
    assert float(weighted_sum(weights(mask, ids, *counts(rows)), values)) == pytest.approx(plain(rows), abs=1e-12)


@every_reduction
@given(rows=SEQUENCES, order=st.randoms(use_true_random=False), cut=st.integers(1, 4))
def test_any_cut_into_micro_batches_in_any_order_adds_up_to_the_whole(name: str, rows: Rows, order: object, cut: int):
    weights, plain = ALL[name]
    shuffled = list(rows)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    total = 0.0
    for start in range(0, len(shuffled), cut):
        mask, ids, values = pack(shuffled[start : start + cut])
        total += float(weighted_sum(weights(mask, ids, *counts(rows)), values))
    assert total == pytest.approx(plain(rows), abs=1e-12)


@every_reduction
def test_nan_at_masked_tokens_reaches_neither_the_sum_nor_the_gradient(name: str):
    mask, ids, values = pack([[(False, math.nan), (True, 2.0)], [(True, 1.0), (False, math.inf), (False, -math.inf)]])
    leaf = values.requires_grad_()
    total = weighted_sum(ALL[name][0](mask, ids, 2, 2), leaf)
    total.backward()
    assert leaf.grad is not None
    assert bool(total.isfinite())
    assert bool(leaf.grad.isfinite().all())
    assert bool((leaf.grad[~mask] == 0).all())


@every_reduction
def test_nan_at_a_token_that_counts_is_not_hidden(name: str):
    mask, ids, values = pack([[(True, math.nan), (True, 2.0)]])
    assert bool(weighted_sum(ALL[name][0](mask, ids, 2, 1), values).isnan())


@every_reduction
def test_an_empty_mask_with_denominators_of_zero_gives_zero(name: str):
    mask, ids, values = pack([[(False, 1.0), (False, 2.0)]])
    assert float(weighted_sum(ALL[name][0](mask, ids, 0, 0), values)) == 0.0


@every_reduction
def test_denominators_may_be_tensors_as_an_all_reduce_gives_them(name: str):
    mask, ids, _ = pack([[(True, 1.0), (True, 2.0)], [(True, 5.0)]])
    weights = ALL[name][0]
    as_tensors = weights(mask, ids, torch.tensor(3), torch.tensor(2.0))  # type: ignore[arg-type]
    torch.testing.assert_close(as_tensors, weights(mask, ids, 3, 2), rtol=1e-15, atol=0)


def test_a_fully_masked_sequence_counts_only_in_the_denominator():
    mask, ids, values = pack([[(True, 4.0)], [(False, 1.0), (False, 1.0)]])
    assert float(weighted_sum(sequence_mean_token_mean(mask, ids, 2, dtype=torch.float64), values)) == 2.0
    assert float(weighted_sum(sequence_mean_token_mean(mask, ids, 1, dtype=torch.float64), values)) == 4.0


def test_padding_may_carry_a_negative_segment_id():
    mask, ids = torch.tensor([True, True, False, False]), torch.tensor([0, 1, -1, -1])
    assert sequence_mean_token_mean(mask, ids, 2).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_token_weights_add_up_to_one_over_the_step():
    mask = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.3
    assert float(token_mean(mask, int(mask.sum())).sum()) == pytest.approx(1.0, rel=1e-5)


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(InputError, match="bool"):
        token_mean(torch.tensor([1.0, 0.5]), 2)


def test_weights_and_values_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="against values"):
        weighted_sum(torch.ones(3), torch.ones(1))


def test_every_prompt_counts_the_same_however_its_responses_are_cut():
    mask = torch.tensor([True, True, False, True, True, True, True])
    prompts = torch.tensor([0, 0, 0, 1, 0, 1, 1])  # a prompt's responses need not lie together
    lengths = torch.stack([(mask & (prompts == p)).sum() for p in prompts])
    weights = prompt_mean_token_mean(mask, lengths, 2, dtype=torch.float64)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6])
    lengths[0] += 2  # two more tokens on another rank
    first = prompt_mean_token_mean(mask[:1], lengths[:1], 2, dtype=torch.float64)
    assert first.tolist() == [1 / 10]


def test_the_plain_sum_weighs_loss_tokens_by_1():
    assert token_sum(torch.tensor([True, False, True])).tolist() == [1.0, 0.0, 1.0]
