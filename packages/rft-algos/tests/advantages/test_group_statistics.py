from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.advantages.group_statistics import (
    centred,
    group_mean,
    group_numbers,
    group_size,
    group_std,
    group_sum,
    grouped,
    is_constant,
    num_groups,
    ratio_or_zero,
)
from rft_algos.input_checks import InputError

ROWS = st.lists(st.tuples(st.sampled_from([-7, 0, 3, 2**60]), st.floats(-10, 10)), max_size=20)


@given(ROWS)
def test_every_quantity_equals_its_plain_twin(rows: list[tuple[int, float]]):
    ids, values = [i for i, _ in rows], [v for _, v in rows]
    mates = [[v for j, v in rows if j == i] for i in ids]
    values_N, groups_N = grouped(torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64))
    assert groups_N.tolist() == [sorted(set(ids)).index(i) for i in ids]
    assert group_size(groups_N).tolist() == [len(m) for m in mates]
    assert group_size(groups_N).dtype == torch.float64
    assert group_sum(values_N, groups_N).tolist() == pytest.approx([math.fsum(m) for m in mates], abs=1e-12)
    assert group_mean(values_N, groups_N).tolist() == pytest.approx([math.fsum(m) / len(m) for m in mates], abs=1e-12)
    constant = [max(m) == min(m) for m in mates]
    assert is_constant(values_N, groups_N).tolist() == constant
    deviations = [0.0 if c else v - math.fsum(m) / len(m) for v, m, c in zip(values, mates, constant, strict=True)]
    assert centred(values_N, groups_N).tolist() == pytest.approx(deviations, abs=1e-12)
    spreads = [0.0 if c else statistics.stdev(m) for m, c in zip(mates, constant, strict=True)]
    assert group_std(values_N, groups_N).tolist() == pytest.approx(spreads, rel=1e-7, abs=1e-9)
    assert int(num_groups(torch.ones(len(ids), dtype=torch.bool), groups_N)) == len(set(ids))
    flags = torch.tensor([i == 3 for i in ids], dtype=torch.bool)
    assert int(num_groups(flags, groups_N)) == int(3 in ids)


def test_numbers_are_dense_and_follow_the_ids():
    assert group_numbers(torch.tensor([50, -4, 50, 7])).tolist() == [2, 0, 2, 1]
    assert group_numbers(torch.tensor([], dtype=torch.int64)).tolist() == []
    several = torch.tensor([3, 3, 1, 1, 3]), torch.tensor([0, 9, 9, 9, 0])
    assert group_numbers(*several).tolist() == [1, 2, 0, 0, 1]


def test_grouped_is_float64_without_gradient():
    rewards, groups = grouped(torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([9, 9]))
    assert rewards.dtype == torch.float64
    assert not rewards.requires_grad
    assert groups.dtype == torch.int64


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="must be a vector"):
        grouped(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="group ids"):
        grouped(torch.ones(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="dropped before advantages"):
        grouped(torch.tensor([math.nan]), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, -5.3])
def test_pitfall_1_equal_values_have_deviations_and_spread_of_exactly_zero(size: int, value: float):
    values = torch.full((size,), value, dtype=torch.float64)
    groups = torch.zeros(size, dtype=torch.int64)
    assert centred(values, groups).tolist() == [0.0] * size
    assert group_std(values, groups).tolist() == [0.0] * size


def test_spread_has_bessels_correction():
    # mean 2, squares 1 + 0 + 1 = 2, over 3 - 1
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert group_std(values, torch.zeros(3, dtype=torch.int64)).tolist() == [1.0, 1.0, 1.0]
    # two values: squares 1/4 + 1/4, over 1
    assert float(group_std(values[:2], torch.zeros(2, dtype=torch.int64))[0]) == pytest.approx(math.sqrt(0.5))


def test_negative_values_are_constant_too():
    assert is_constant(torch.tensor([-1.0, -1.0, -2.0]).double(), torch.tensor([0, 0, 1])).tolist() == [True] * 3


def test_zero_over_anything_is_zero():
    result = ratio_or_zero(torch.tensor([0.0, 0.0, 3.0, -3.0]).double(), torch.tensor([0.0, 2.0, 2.0, 4.0]).double())
    assert result.tolist() == [0.0, 0.0, 1.5, -0.75]
