from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.input_checks import InputError
from rft_algos.losses.value import (
    ValueMoments,
    clipped_value_loss,
    explained_variance,
    huber_value_loss,
    squared_value_loss,
    value_clipped,
    value_moments,
)

NUMBER = st.floats(-5, 5)
TOKENS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=20)
MASKED_TOKENS = st.lists(st.tuples(st.booleans(), NUMBER, NUMBER), max_size=20)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(tokens: list[tuple[float, float, float]], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=dtype) for column in zip(*tokens, strict=True)]


def plain_loss(value: float, old: float, target: float, clip: float | None) -> float:
    loss = (value - target) ** 2 / 2
    if clip is None:
        return loss
    near = min(max(value, old - clip), old + clip)
    return max(loss, (near - target) ** 2 / 2)


def plain_explained_variance(rows: list[tuple[bool, float, float]]) -> float | None:
    targets = [g for kept, _, g in rows if kept]
    residuals = [g - v for kept, v, g in rows if kept]
    if len(set(targets)) < 2:
        return None
    return 1 - statistics.pvariance(residuals) / statistics.pvariance(targets)


def moments_of(rows: list[tuple[bool, float, float]]) -> ValueMoments:
    return value_moments(
        doubles(*[v for _, v, _ in rows]),
        doubles(*[g for _, _, g in rows]),
        torch.tensor([kept for kept, _, _ in rows], dtype=torch.bool),
    )


# the losses


def test_half_the_squared_error():
    values = doubles(3.0, -1.0, 2.0).requires_grad_()
    losses = squared_value_loss(values, doubles(1.0, 2.0, 2.0))
    losses.sum().backward()
    assert losses.tolist() == [2.0, 4.5, 0.0]  # 2^2 / 2, 3^2 / 2, 0
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, -3.0, 0.0]  # V - G


def test_hand_computed_values_on_both_sides_of_the_clip():
    old = doubles(1.0, 1.0, 1.0, 1.0, 1.0)
    values = doubles(1.5, 1.5, 0.5, 1.1, 0.5)
    targets = doubles(3.0, 0.0, 3.0, 3.0, -1.0)
    # kept within 0.2 of the old: 1.2, 1.2, 0.8, 1.1, 0.8; squared errors of both, the larger of which is halved:
    # (2.25, 3.24), (2.25, 1.44), (6.25, 4.84), (3.61, 3.61), (2.25, 3.24)
    losses = clipped_value_loss(values, old, targets, 0.2)
    assert losses.tolist() == pytest.approx([1.62, 1.125, 3.125, 1.805, 1.62], rel=1e-12)
    assert value_clipped(values, old, targets, 0.2).tolist() == [True, False, False, False, True]


@given(TOKENS, st.sampled_from([None, 0.05, 0.2, 1.0, 50.0]))
def test_equals_a_plain_twin(tokens: list[tuple[float, float, float]], clip: float | None):
    expected = [plain_loss(v, old, g, clip) for v, old, g in tokens]
    assert clipped_value_loss(*columns(tokens), clip).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)
    single = clipped_value_loss(*columns(tokens, torch.float32), clip)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(TOKENS, st.sampled_from([0.05, 0.2, 1.0]))
def test_the_clip_indicator_is_where_the_gradient_is_zero(tokens: list[tuple[float, float, float]], clip: float):
    values, old, targets = columns(tokens)
    targets = torch.where((values - targets).abs() < 1e-3, targets + 1.0, targets)
    values.requires_grad_()
    clipped_value_loss(values, old, targets, clip).sum().backward()
    assert values.grad is not None
    assert (values.grad == 0).tolist() == value_clipped(values, old, targets, clip).tolist()


def test_exactly_at_the_clip_nothing_is_clipped():
    values, old, targets = doubles(1.25, 0.75, 1.25000001), doubles(1.0, 1.0, 1.0), doubles(3.0, -3.0, 3.0)
    values.requires_grad_()
    losses = clipped_value_loss(values, old, targets, 0.25)
    losses.sum().backward()
    assert losses[:2].tolist() == [1.53125, 7.03125]  # 1.75^2 / 2, 3.75^2 / 2
    assert values.grad is not None
    assert values.grad.tolist() == [-1.75, 3.75, 0.0]
    assert value_clipped(values, old, targets, 0.25).tolist() == [False, False, True]


def test_a_clip_that_loses_nothing_is_not_one_that_decides():
    # the return lies midway between the value 1.5 and the bound 1.25: both errors are 0.125
    assert value_clipped(doubles(1.5), doubles(1.0), doubles(1.375), 0.25).tolist() == [False]


def test_without_a_clip_it_is_the_squared_error():
    values, old, targets = doubles(9.0, -4.0), doubles(0.0, 0.0), doubles(1.0, 2.0)
    leaf = values.clone().requires_grad_()
    losses = clipped_value_loss(leaf, old, targets, None)
    losses.sum().backward()
    assert losses.tolist() == squared_value_loss(values, targets).tolist()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [8.0, -6.0]
    clipped = value_clipped(values, old, targets, None)
    assert clipped.dtype == torch.bool
    assert clipped.tolist() == [False, False]
    assert torch.equal(clipped_value_loss(values, old, targets, 1e6), squared_value_loss(values, targets))


def test_gradients_are_right_and_flow_to_the_values_alone():
    values = doubles(1.5, 0.4, 1.1, -2.0).requires_grad_()
    old, targets = doubles(1.0, 1.0, 1.0, 1.0), doubles(0.0, 3.0, 2.5, -9.0)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, targets, 0.2), (values,))
    assert torch.autograd.gradcheck(lambda v: squared_value_loss(v, targets), (values,))
    old.requires_grad_()
    targets.requires_grad_()
    (clipped_value_loss(values, old, targets, 0.2) + squared_value_loss(values, targets)).sum().backward()
    assert old.grad is None
    assert targets.grad is None


def test_tokens_do_not_see_each_other():
    generator = torch.Generator().manual_seed(5)
    values, old, targets = torch.randn(3, 12, dtype=torch.float64, generator=generator)
    order = torch.randperm(12, generator=generator)
    whole = clipped_value_loss(values, old, targets, 0.3)
    assert torch.equal(clipped_value_loss(values[order], old[order], targets[order], 0.3), whole[order])
    halves = [clipped_value_loss(values[s], old[s], targets[s], 0.3) for s in (slice(0, 5), slice(5, 12))]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize("clip", [0.0, -0.2])
def test_a_clip_that_is_not_positive_is_refused(clip: float):
    x = doubles(1.0)
    with pytest.raises(InputError, match="clip must be positive"):
        clipped_value_loss(x, x, x, clip)
    with pytest.raises(InputError, match="clip must be positive"):
        value_clipped(x, x, x, clip)


# how much is explained


def test_the_moments_of_the_example_are_hand_computed():
    moments = moments_of([(True, 1.0, 1.0), (False, math.nan, math.inf), (True, 2.0, 3.0)])
    # returns 1, 3: mean 2, deviations -1, 1; residuals 0, 1: mean 1/2, deviations -1/2, 1/2
    fields = dataclasses.astuple(moments)
    assert [float(x) for x in fields] == [2.0, 2.0, 2.0, 0.5, 0.5]
    assert all(x.dtype == torch.float64 and x.shape == () for x in fields)
    assert explained_variance(moments) == 0.75  # 1 - 0.5 / 2


@given(MASKED_TOKENS)
def test_explained_variance_equals_a_plain_twin(rows: list[tuple[bool, float, float]]):
    rows = [(kept, round(v, 3), round(g, 3)) for kept, v, g in rows]
    expected = plain_explained_variance(rows)
    result = explained_variance(moments_of(rows))
    assert result == (None if expected is None else pytest.approx(expected, rel=1e-12, abs=1e-9))


def test_the_best_a_constant_and_a_worse_critic():
    targets = [0.5, -1.0, 2.0, 3.0]
    assert explained_variance(moments_of([(True, g, g) for g in targets])) == 1.0
    assert explained_variance(moments_of([(True, g + 7.0, g) for g in targets])) == 1.0  # an offset is forgiven
    assert explained_variance(moments_of([(True, 4.0, g) for g in targets])) == 0.0
    assert explained_variance(moments_of([(True, -g, g) for g in targets])) == -3.0  # 1 - Var(2 G) / Var(G)


@pytest.mark.parametrize("target", [0.1, 0.3, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pitfall_1_equal_returns_have_exactly_no_variance_to_explain(target: float, size: int):
    rows = [(True, 0.01 * i, target) for i in range(size)]
    whole = moments_of(rows)
    merged = moments_of(rows[:1]).merge(moments_of(rows[1:])).merge(moments_of([]))
    for moments in (whole, merged):
        assert float(moments.returns_m2) == 0.0
        assert float(moments.returns_mean) == target
        assert explained_variance(moments) is None


def test_pitfall_6_nan_at_masked_positions_counts_for_nothing():
    clean = [(True, 1.0, 2.0), (True, 0.5, -1.0), (True, 3.0, 2.5)]
    dirty = [(False, math.nan, 1.0), *clean[:2], (False, 0.0, math.nan), *clean[2:], (False, math.inf, -math.inf)]
    for a, b in zip(dataclasses.astuple(moments_of(dirty)), dataclasses.astuple(moments_of(clean)), strict=True):
        assert torch.equal(a, b)
    assert math.isnan(explained_variance(moments_of([*clean, (True, math.nan, 1.0)])) or 0.0)  # it is not hidden


def test_pitfall_8_the_cut_into_micro_batches_and_its_order_do_not_matter():
    source = random.Random(3)
    rows = [(source.random() < 0.7, source.gauss(50, 3), source.gauss(52, 4)) for _ in range(60)]
    expected = plain_explained_variance(rows)
    whole = dataclasses.astuple(moments_of(rows))
    for _ in range(20):
        cuts = [0, *sorted(source.sample(range(61), 4)), 60]
        parts = [moments_of(rows[a:b]) for a, b in itertools.pairwise(cuts)]
        source.shuffle(parts)
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        for a, b in zip(dataclasses.astuple(merged), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert explained_variance(merged) == pytest.approx(expected, rel=1e-12)


def test_a_small_spread_far_from_zero_keeps_its_digits():
    rows = [(True, 1e6, 1e6 + 0.01), (True, 1e6, 1e6), (True, 1e6 + 0.01, 1e6)]
    exact = 1 - statistics.pvariance([0.01, 0.0, -0.01]) / statistics.pvariance([0.01, 0.0, 0.0])
    assert explained_variance(moments_of(rows)) == pytest.approx(exact, rel=1e-6)
    merged = moments_of(rows[:1]).merge(moments_of(rows[1:]))
    assert explained_variance(merged) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("rows", [[], [(False, 1.0, 2.0), (False, math.nan, math.nan)]])
def test_no_tokens_have_moments_of_zero_and_change_nothing(rows: list[tuple[bool, float, float]]):
    empty = moments_of(rows)
    assert [float(x) for x in dataclasses.astuple(empty)] == [0.0] * 5
    assert explained_variance(empty) is None
    some = moments_of([(True, 1.0, 5.0), (True, 2.0, 7.0)])
    for merged in (empty.merge(some), some.merge(empty)):
        assert [float(x) for x in dataclasses.astuple(merged)] == [float(x) for x in dataclasses.astuple(some)]
    single = moments_of([(True, 1.0, 5.0)])
    assert [float(x) for x in dataclasses.astuple(single)] == [1.0, 5.0, 0.0, 4.0, 0.0]
    assert [float(x) for x in dataclasses.astuple(empty.merge(single))] == [1.0, 5.0, 0.0, 4.0, 0.0]
    assert [float(x) for x in dataclasses.astuple(empty.merge(empty))] == [0.0] * 5


def test_single_precision_inputs_are_summed_in_double_precision_without_gradient():
    values, targets = torch.tensor([0.1, 0.2, 0.4], requires_grad=True), torch.tensor([16777216.0, 0.1, 0.3])
    moments = value_moments(values, targets, torch.ones(3, dtype=torch.bool))
    exact = moments_of([(True, v, g) for v, g in zip(values.tolist(), targets.tolist(), strict=True)])
    for a, b in zip(dataclasses.astuple(moments), dataclasses.astuple(exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)
        assert not a.requires_grad
    assert float(moments.returns_mean) == pytest.approx((16777216 + targets[1:].double().sum().item()) / 3, rel=1e-15)


def test_wrong_shapes_and_masks_are_refused():
    x, mask = doubles(1.0, 2.0), torch.tensor([True, False])
    with pytest.raises(InputError, match="must be bool"):
        value_moments(x, x, mask.long())
    with pytest.raises(InputError, match="one shape"):
        value_moments(x, x[:1], mask)
    with pytest.raises(InputError, match="one shape"):
        value_moments(x[:1], x, mask)


@pytest.mark.parametrize("delta", [0.5, 1.0, 10.0])
def test_huber_is_the_square_within_and_its_tangent_beyond(delta: float):
    values = torch.linspace(-3, 3, 41, dtype=torch.float64).requires_grad_()
    returns = torch.zeros(41, dtype=torch.float64)
    found = huber_value_loss(values, returns, delta)
    plain = [e * e / 2 if abs(e) <= delta else delta * (abs(e) - delta / 2) for e in values.tolist()]
    assert found.tolist() == pytest.approx(plain)
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([max(-delta, min(delta, e)) for e in values.tolist()])
    with pytest.raises(InputError, match="delta must be positive"):
        huber_value_loss(values, returns, 0.0)
