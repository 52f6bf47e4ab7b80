from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.packed.segments import (
    SegmentIndex,
    broadcast_to_tokens,
    segment_counts,
    segment_index,
    segment_lengths,
    segment_means,
    segment_sums,
)

NAN = math.nan


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(seed: int) -> tuple[list[float], list[bool], list[int]]:
    """Values, mask and ids: padding at any place, sequences without loss tokens, NaN where masked; every third long."""
    numbers = random.Random(seed)
    is_long = seed % 3 == 2
    around = [5, 128, 129, 160, 193, 256, 301] if is_long else [1, 1, 2, 3, 8, 17]
    lengths = [numbers.choice(around) for _ in range(numbers.randint(1, 8))]
    names = [i if numbers.random() < 0.8 else -1 for i in numbers.sample(range(sum(lengths)), len(lengths))]
    ids = [i for i, length in zip(names, lengths, strict=True) for _ in range(length)]
    masked_row = numbers.choice(names)
    if is_long:  # one stretch of 50, so that runs stay long
        first = numbers.randrange(len(ids))
        mask = [not first <= t < first + 50 and i >= 0 and i != masked_row for t, i in enumerate(ids)]
    else:
        mask = [numbers.random() < 0.7 and i >= 0 and i != masked_row for i in ids]
    return [numbers.gauss(0, 1) if kept else NAN for kept in mask], mask, ids


def plain_sums(values: list[float], mask: list[bool], ids: list[int]) -> list[float]:
    return [
        math.fsum(v for v, kept, j in zip(values, mask, ids, strict=True) if kept and j == i) if i >= 0 else 0.0
        for i in ids
    ]


def by_index(places: SegmentIndex) -> SegmentIndex:
    """As off the CPU: one slot for every token there could be, no runs."""
    num_tokens = places.index_T.shape[0]
    return SegmentIndex(torch.where(places.index_T == places.spare, num_tokens, places.index_T), num_tokens, None)


def sums_at_tokens(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """The sum of its sequence at every token; padding has the id -1, which is the spare slot."""
    return segment_sums(values, segment_index(mask, ids))[ids]


def means_at_tokens(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """The mean of its sequence at every token."""
    return segment_means(values, segment_index(mask, ids))[ids]


def test_hand_computed_values():
    values, mask = doubles(1.0, NAN, 3.0, 5.0, 7.0), torch.tensor([True, False, True, True, False])
    ids = torch.tensor([2, 2, 2, 0, -1])
    assert sums_at_tokens(values, mask, ids).tolist() == [4.0, 4.0, 4.0, 5.0, 0.0]
    assert segment_lengths(mask, ids).tolist() == [2.0, 2.0, 2.0, 1.0, 0.0]
    assert means_at_tokens(values, mask, ids).tolist() == [2.0, 2.0, 2.0, 5.0, 0.0]
    places = segment_index(mask, ids)
    assert places.index_T.tolist() == [2, 3, 2, 0, 3]
    assert places.spare == 3
    assert places.runs is not None
    assert [part.tolist() for part in places.runs] == [[2, 3, 2, 0, 3], [1, 1, 1, 1, 1]]
    assert segment_sums(values, places).tolist() == [5.0, 0.0, 4.0, 0.0]
    assert segment_counts(places, dtype=torch.float64).tolist() == [1.0, 0.0, 2.0, 0.0]
    assert segment_means(values, places).tolist() == [5.0, 0.0, 2.0, 0.0]
    assert broadcast_to_tokens(doubles(10.0, 20.0, 30.0, NAN), places).tolist() == [30.0, 0.0, 30.0, 10.0, 0.0]


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_plain_twin(seed: int):
    lists = ragged(seed)
    values, mask, ids = doubles(*lists[0]), torch.tensor(lists[1]), torch.tensor(lists[2])
    sums = plain_sums(*lists)
    lengths = plain_sums([1.0] * len(lists[2]), lists[1], lists[2])
    assert sums_at_tokens(values, mask, ids).tolist() == pytest.approx(sums, rel=1e-12, abs=1e-14)
    assert segment_lengths(mask, ids, dtype=torch.float64).tolist() == lengths
    means = [s / max(1, n) for s, n in zip(sums, lengths, strict=True)]
    assert means_at_tokens(values, mask, ids).tolist() == pytest.approx(means, rel=1e-12, abs=1e-14)
    single = means_at_tokens(values.float(), mask, ids)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(means, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_the_way_of_the_cpu_and_that_of_other_devices_agree(seed: int):
    lists = ragged(seed)
    values, mask, ids = doubles(*lists[0]), torch.tensor(lists[1]), torch.tensor(lists[2])
    runs = segment_index(mask, ids)
    index = by_index(runs)
    found = [
        [
            broadcast_to_tokens(function(places), places)
            for function in (
                lambda p: segment_sums(values, p),
                lambda p: segment_means(values, p),
                lambda p: segment_counts(p, dtype=torch.float64),
            )
        ]
        for places in (runs, index)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
    for places in (runs, index):
        assert segment_sums(values, places).shape == (places.spare + 1,)
        assert float(segment_sums(values, places)[-1]) == 0.0
        assert float(segment_counts(places, dtype=torch.float64)[-1]) == 0.0


def test_long_runs_are_summed_in_rows_and_short_ones_are_not():
    one_run = torch.zeros(128, dtype=torch.int64)
    assert segment_index(torch.ones(128, dtype=torch.bool), one_run).rows is not None
    assert segment_index(torch.ones(127, dtype=torch.bool), one_run[1:]).rows is None
    # the last run has none of the whole rows
    ends_short = torch.tensor([301, 301, 5])
    rows = segment_index(torch.ones(607, dtype=torch.bool), torch.arange(3).repeat_interleave(ends_short)).rows
    assert rows is not None
    assert rows.whole_2R.tolist() == [0, 9, 1, 8, 0, 0]
    for seed in range(60):
        _, mask, ids = ragged(seed)
        places = segment_index(torch.tensor(mask), torch.tensor(ids))
        assert places.runs is not None
        assert (places.rows is not None) == (len(ids) // 32 >= 4 * places.runs[0].shape[0])
        if places.rows is None:
            continue
        row_ids, rest = places.rows.split(places.index_T)
        ragged_rows = [i for i, row in enumerate(row_ids.tolist()) if len(set(row)) > 1]
        assert places.rows.ragged_X.tolist() == ragged_rows
        assert int(places.rows.whole_2R.sum()) == len(ids) // 32
        assert rest.shape[0] == len(ids) % 32


def test_counts_keep_the_type_they_are_asked_for():
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
    assert segment_lengths(mask, ids).dtype == torch.float32
    for places in (segment_index(mask, ids), by_index(segment_index(mask, ids))):
        for dtype in (torch.float32, torch.float64):
            assert segment_counts(places, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("way", [lambda p: p, by_index])
def test_gradients_are_right(way: object):
    assert callable(way)
    mask, ids = torch.tensor([True] * 6 + [False, True]), torch.tensor([2, 2, 2, 0, 0, 1, 1, -1])
    places = way(segment_index(mask, ids))
    values = torch.linspace(-1, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_sums(x, places), (values,))
    assert torch.autograd.gradcheck(lambda x: segment_means(x, places), (values,))
    per_slot = torch.linspace(-1, 2, places.spare + 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: broadcast_to_tokens(x, places), (per_slot,))
    assert torch.autograd.gradcheck(lambda x: broadcast_to_tokens(segment_means(x, places).exp(), places), (values,))
    long = way(segment_index(torch.arange(300) != 170, torch.arange(300) // 150))
    values_T = torch.linspace(-1, 2, 300, dtype=torch.float64, requires_grad=True)
    per_long_slot = torch.linspace(-1, 2, long.spare + 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_sums(x, long), (values_T,))
    assert torch.autograd.gradcheck(lambda x: broadcast_to_tokens(x, long), (per_long_slot,))
    for function in (sums_at_tokens, means_at_tokens):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, mask, ids), (values,))


@pytest.mark.parametrize("way", [lambda p: p, by_index])
def test_pitfall_6_nan_at_masked_positions_reaches_neither_value_nor_gradient(way: object):
    assert callable(way)
    for seed in range(20):
        lists = ragged(seed)
        mask = torch.tensor(lists[1])
        places = way(segment_index(mask, torch.tensor(lists[2])))
        leaf = doubles(*lists[0]).requires_grad_()
        means = broadcast_to_tokens(segment_means(leaf, places), places)
        # the gradient that arrives at masked tokens may be NaN as well
        means.backward(torch.where(mask, 1.0, NAN).double())
        assert leaf.grad is not None
        assert bool(means.isfinite().all())
        assert leaf.grad.tolist() == pytest.approx([float(kept) for kept in lists[1]])


@pytest.mark.parametrize("function", [sums_at_tokens, means_at_tokens])
def test_nan_at_masked_positions_reaches_no_token_of_its_sequence(function: object):
    assert callable(function)
    leaf = doubles(1.0, NAN, 2.0).requires_grad_()
    found = function(leaf, torch.tensor([True, False, True]), torch.tensor([0, 0, 0]))
    found.sum().backward()
    assert leaf.grad is not None
    assert bool(found.isfinite().all())
    assert leaf.grad[1].item() == 0.0


def test_an_empty_row_a_masked_row_and_padding_alone():
    empty = doubles()
    assert means_at_tokens(empty, empty.bool(), empty.long()).shape == (0,)
    assert segment_index(empty.bool(), empty.long()).spare == 0
    values, ids = doubles(NAN, NAN), torch.tensor([0, 0])
    assert means_at_tokens(values, torch.tensor([False, False]), ids).tolist() == [0.0, 0.0]
    assert sums_at_tokens(values, torch.tensor([True, True]), torch.tensor([-1, -1])).tolist() == [0.0, 0.0]


def test_inputs_that_do_not_fit_are_refused():
    x, mask, ids = doubles(1.0, 2.0), torch.tensor([True, True]), torch.tensor([0, 0])
    with pytest.raises(InputError, match=r"loss_mask_T must be bool, it is torch\.float64"):
        segment_lengths(x, ids)
    with pytest.raises(InputError, match=r"torch.Size\(\[1\]\) mask for torch.Size\(\[2\]\) segment ids"):
        segment_lengths(mask[:1], ids)
    with pytest.raises(InputError, match=r"torch.Size\(\[1\]\) values for torch.Size\(\[2\]\) segment ids"):
        sums_at_tokens(x[:1], mask, ids)
    with pytest.raises(InputError, match="values for"):
        segment_sums(x[:1], replace(segment_index(mask, ids), runs=None))


class Elsewhere(Tensor):
    """Says that it is not on the CPU, so that sums are made token by token."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
def test_half_types_are_summed_and_counted_in_float32(dtype: torch.dtype, kind: type[Tensor]) -> None:
    num = 5000  # bfloat16 stops at 256, float16 at 2048
    mask_T, ids_T = torch.ones(num, dtype=torch.bool), torch.zeros(num, dtype=torch.int64)
    places = segment_index(mask_T.as_subclass(kind), ids_T.as_subclass(kind))
    values_T = torch.full((num,), 0.5, dtype=dtype).requires_grad_()
    assert segment_sums(values_T, places)[0].item() == 2500
    assert segment_means(values_T, places)[0].item() == 0.5
    counts_S = segment_counts(places, dtype=dtype)
    assert (counts_S.dtype, counts_S[0].item()) == (dtype, torch.tensor(5000.0).to(dtype).item())
    segment_means(values_T, places)[0].backward()
    assert values_T.grad is not None
    assert values_T.grad.dtype == dtype
