from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.advantages import Moments, clip, moments, whiten
from rft_algos.input_checks import InputError

TOKENS = st.lists(st.tuples(st.booleans(), st.floats(-10, 10)), max_size=20)


def tensors(tokens: list[tuple[bool, float]], masked: float = math.nan) -> tuple[Tensor, Tensor]:
    values = [value if kept else masked for kept, value in tokens]
    return torch.tensor(values, dtype=torch.float64), torch.tensor([kept for kept, _ in tokens], dtype=torch.bool)


def as_floats(record: Moments) -> tuple[float, float, float]:
    return float(record.count), float(record.mean), float(record.m2)


def plain_moments(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return 0.0, 0.0, 0.0
    mean = values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
    return float(len(values)), mean, math.fsum((v - mean) ** 2 for v in values)


def test_moments_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14
    record = moments(torch.tensor([1.0, math.nan, 2.0, 6.0]), torch.tensor([True, False, True, True]))
    assert as_floats(record) == (3.0, 3.0, 14.0)
    assert float(record.std()) == pytest.approx(math.sqrt(7), rel=1e-15)
    assert float(record.std(ddof=0)) == pytest.approx(math.sqrt(14 / 3), rel=1e-15)


@given(TOKENS)
def test_pitfall_6_moments_equal_a_plain_twin_with_nan_at_masked_positions(tokens: list[tuple[bool, float]]):
    expected = plain_moments([value for kept, value in tokens if kept])
    assert as_floats(moments(*tensors(tokens))) == pytest.approx(expected, rel=1e-12, abs=1e-11)


@given(TOKENS, TOKENS, TOKENS)
def test_pitfall_15_merged_moments_are_those_of_the_whole_whatever_the_cut(
    a: list[tuple[bool, float]], b: list[tuple[bool, float]], c: list[tuple[bool, float]]
):
    whole = as_floats(moments(*tensors(a + b + c)))
    one, two, three = (moments(*tensors(part)) for part in (a, b, c))
    for merged in (one.merge(two).merge(three), one.merge(two.merge(three)), three.merge(one).merge(two)):
        assert as_floats(merged) == pytest.approx(whole, rel=1e-11, abs=1e-11)


def test_merging_by_hand():
    # 1, 3 (mean 2, m2 2) and 7 (mean 7): mean 11 / 3, m2 2 + 25 * 2 / 3
    merged = moments(torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool)).merge(
        moments(torch.tensor([7.0]), torch.ones(1, dtype=torch.bool))
    )
    assert as_floats(merged) == pytest.approx((3.0, 11 / 3, 2 + 50 / 3), rel=1e-15)


def test_merging_with_nothing_changes_nothing():
    none = moments(torch.empty(0), torch.empty(0, dtype=torch.bool))
    some = moments(torch.tensor([0.1, 0.3]), torch.ones(2, dtype=torch.bool))
    assert as_floats(none) == (0.0, 0.0, 0.0)
    assert as_floats(none.merge(none)) == (0.0, 0.0, 0.0)
    assert as_floats(none.merge(some)) == as_floats(some.merge(none)) == as_floats(some)


def test_moments_are_float64_scalars_without_gradient():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    record = moments(values, torch.ones(2, dtype=torch.bool))
    for part in (record.count, record.mean, record.m2, record.std()):
        assert part.dtype == torch.float64
        assert part.shape == ()
        assert not part.requires_grad


def test_moments_leave_the_values_alone():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    moments(values, torch.ones(2, dtype=torch.bool))
    assert values.tolist() == [1.0, 2.0]


def test_moments_far_from_zero_keep_their_digits():
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    assert as_floats(moments(values, torch.ones(3, dtype=torch.bool))) == (3.0, 1e9 + 1, 2.0)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, -5.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pitfall_1_equal_values_whiten_to_exactly_zero(value: float, size: int):
    values, mask = torch.full((size,), value, dtype=torch.float64), torch.ones(size, dtype=torch.bool)
    record = moments(values, mask)
    assert float(record.m2) == 0.0
    assert float(record.mean) == float(values[0])
    for merged in (record, record.merge(record), record.merge(record).merge(record)):
        assert float(merged.m2) == 0.0
        for center in (True, False):
            assert whiten(values, mask, merged, center=center).tolist() == [0.0] * size
            assert whiten(values, mask, merged, center=center, epsilon=0.0).tolist() == [0.0] * size


@pytest.mark.parametrize("ddof", [0, 1])
def test_pitfall_14_one_token_and_none_whiten_to_zero_without_nan(ddof: int):
    for mask in ([True, False], [False, False]):
        values, mask_T = torch.tensor([3.0, math.nan]), torch.tensor(mask)
        record = moments(values, mask_T)
        assert float(record.std(ddof=ddof)) == 0.0
        assert whiten(values, mask_T, record, ddof=ddof).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_all_nan_and_is_never_turned_into_one(value: float, center: bool):
    values, mask = torch.tensor([1.0, 2.0, value, 4.0]), torch.tensor([True, True, True, False])
    whitened = whiten(values, mask, moments(values, mask), center=center)
    assert whitened[:3].isnan().all()
    assert whitened[3] == 0
    # where it is masked it says nothing
    mask = torch.tensor([True, True, False, True])
    assert whiten(values, mask, moments(values, mask), center=center).isfinite().all()


def test_whitening_by_hand():
    # 1, 2, 6: mean 3, std sqrt 7; 0.5 is added; a masked infinity between
    values, mask = torch.tensor([1.0, math.inf, 2.0, 6.0]), torch.tensor([True, False, True, True])
    record = moments(values, mask)
    scale = math.sqrt(7) + 0.5
    result = whiten(values, mask, record, epsilon=0.5)
    assert result.tolist() == pytest.approx([-2 / scale, 0.0, -1 / scale, 3 / scale], rel=1e-12)
    result = whiten(values, mask, record, epsilon=0.5, center=False)
    assert result.tolist() == pytest.approx([1 / scale, 0.0, 2 / scale, 6 / scale], rel=1e-12)
    result = whiten(values, mask, record, epsilon=0.5, ddof=0)
    assert float(result[3]) == pytest.approx(3 / (math.sqrt(14 / 3) + 0.5), rel=1e-12)


@given(TOKENS, st.booleans(), st.sampled_from([0, 1]))
def test_whitening_equals_a_plain_twin(tokens: list[tuple[bool, float]], center: bool, ddof: int):
    kept = [value for is_kept, value in tokens if is_kept]
    has_spread = len(set(kept)) > 1
    spread = (statistics.stdev(kept) if ddof else statistics.pstdev(kept)) if has_spread else 0.0
    mean = math.fsum(kept) / len(kept) if kept and center else 0.0
    expected = [(v - mean) / (spread + 0.01) if is_kept and has_spread else 0.0 for is_kept, v in tokens]
    values, mask = tensors(tokens)
    result = whiten(values, mask, moments(values, mask), epsilon=0.01, center=center, ddof=ddof)
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-10)


def test_defaults_are_centred_with_bessels_correction_and_a_hundred_millionth():
    values, mask = torch.tensor([0.0, 1e-8]).double(), torch.ones(2, dtype=torch.bool)
    record = moments(values, mask)
    expected = 0.5e-8 / (1e-8 * math.sqrt(0.5) + 1e-8)
    assert whiten(values, mask, record).tolist() == pytest.approx([-expected, expected], rel=1e-6)
    assert torch.equal(whiten(values, mask, record), whiten(values, mask, record, center=True, ddof=1, epsilon=1e-8))


def test_whitened_values_have_mean_zero_and_variance_one():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3 + 100
    mask = torch.ones(1000, dtype=torch.bool)
    whitened = whiten(values, mask, moments(values, mask))
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(whitened.std()) == pytest.approx(1.0, rel=1e-7)


def test_float32_values_are_whitened_in_float64():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(50, dtype=torch.bool)
    exact = whiten(values, mask, moments(values, mask))
    rounded = whiten(values.float(), mask, moments(values.float(), mask))
    assert rounded.dtype == torch.float64
    assert torch.allclose(rounded, exact, rtol=1e-5, atol=1e-6)


def test_whitening_has_no_gradient_and_leaves_its_input():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    assert not whiten(values, mask, moments(values, mask)).requires_grad
    assert values.tolist() == [1.0, 2.0]


def test_clipping_by_hand():
    clipped, is_clipped = clip(torch.tensor([-3.0, -2.0, 0.5, 2.0, 2.5]), 2.0)
    assert clipped.tolist() == [-2.0, -2.0, 0.5, 2.0, 2.0]
    assert is_clipped.tolist() == [True, False, False, False, True]
    assert clipped.dtype == torch.float32


def test_what_does_not_fit_is_refused():
    record = moments(torch.ones(2), torch.ones(2, dtype=torch.bool))
    with pytest.raises(InputError, match="mask_T must be bool"):
        moments(torch.ones(2), torch.ones(2))
    with pytest.raises(InputError, match="values"):
        moments(torch.ones(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(InputError, match="values"):
        whiten(torch.ones(1), torch.ones(2, dtype=torch.bool), record)
    for limit in (0.0, -1.0):
        with pytest.raises(InputError, match="must be positive"):
            clip(torch.ones(2), limit)
