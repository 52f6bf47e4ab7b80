from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.packed import reverse_scan as scan
from rft_algos.packed.reverse_scan import (
    gather_loss_tokens,
    loss_positions,
    reverse_scan,
    reverse_scan_,
    same_sequence,
    scatter_loss_tokens,
)

LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 4095, 4096, 4097, 8192, 8200, 70_001)


def plain_scan(values: list[float], coefficients: list[float]) -> list[float]:
    result, later = [], 0.0
    for value, coefficient in zip(reversed(values), reversed(coefficients), strict=True):
        later = value + coefficient * later
        result.append(later)
    return result[::-1]


def random_inputs(length: int, low: float = -1.0) -> tuple[Tensor, Tensor]:
    draw = random.Random(length)
    values = [draw.gauss(0, 1) for _ in range(length)]
    coefficients = [draw.choice((0.0, 1.0, draw.uniform(low, 1), 0.95, 0.999)) for _ in range(length)]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(coefficients, dtype=torch.float64)


def test_hand_computed_values():
    # from the end: 4, then 2 + 0.5 * 4 = 4, then 1 + 0.25 * 4 = 2; the last coefficient meets 0
    result = reverse_scan(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.25, 0.5, 0.75]))
    assert result.tolist() == [2.0, 4.0, 4.0]


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_plain_loop_around_every_block_boundary(length: int):
    values, coefficients = random_inputs(length)
    expected = plain_scan(values.tolist(), coefficients.tolist())
    assert torch.allclose(
        reverse_scan(values, coefficients), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("length", [300, 16_384])
def test_float32_stays_float32_and_within_its_rounding(length: int):
    values, coefficients = random_inputs(length, low=0.0)
    expected = plain_scan(values.tolist(), coefficients.tolist())
    result = reverse_scan(values.float(), coefficients.float())
    assert result.dtype == torch.float32
    scale = max(map(abs, expected))
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5 * scale)


def test_a_carry_crosses_thousands_of_blocks():
    length = 3 * 64 * 64 + 17
    values = torch.zeros(length, dtype=torch.float64)
    values[-1] = 1.0
    coefficients = torch.full((length,), 0.9999, dtype=torch.float64)
    assert float(reverse_scan(values, coefficients)[0]) == pytest.approx(0.9999 ** (length - 1), rel=1e-10)


@pytest.mark.parametrize("length", [128, 4097, 20_000])
def test_what_enters_a_block_is_multiplied_by_all_its_coefficients(length: int):
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    coefficients = 1 - 0.02 * torch.rand(length, generator=generator, dtype=torch.float64)
    expected = plain_scan(values.tolist(), coefficients.tolist())
    assert reverse_scan(values, coefficients).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("chunk", [64, 100, 1000, 4999, 5000])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch):
    values, coefficients = random_inputs(5000)
    coefficients[::chunk] = 0.5
    expected = plain_scan(values.tolist(), coefficients.tolist())
    monkeypatch.setattr(scan, "_CHUNK", chunk)
    assert reverse_scan(values, coefficients).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_run_of_ones_is_a_reversed_running_sum_across_chunks():
    length = scan._CHUNK + 3
    result = reverse_scan(torch.ones(length, dtype=torch.float64), torch.ones(length, dtype=torch.float64))
    assert torch.equal(result, torch.arange(length, 0, -1, dtype=torch.float64))


def test_a_coefficient_of_zero_cuts():
    result = reverse_scan(torch.tensor([1.0, 10.0, 100.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert result.tolist() == [11.0, 10.0, 100.0]


def test_inputs_are_left_alone_and_carry_no_gradient():
    values = torch.ones(200, requires_grad=True)
    coefficients = torch.ones(200, requires_grad=True)
    result = reverse_scan(values, coefficients)
    assert not result.requires_grad
    assert torch.equal(values.detach(), torch.ones(200))
    assert torch.equal(coefficients.detach(), torch.ones(200))


def test_in_place_gives_the_same_in_the_same_memory():
    values, coefficients = random_inputs(1000)
    expected = reverse_scan(values, coefficients)
    before = coefficients.clone()
    result = reverse_scan_(values, coefficients.requires_grad_())
    assert result is values
    assert not result.requires_grad
    assert torch.equal(result, expected)
    assert torch.equal(coefficients, before)


def test_strided_inputs():
    values, coefficients = random_inputs(1000)
    expected = plain_scan(values[::2].tolist(), coefficients[::2].tolist())
    assert reverse_scan(values[::2], coefficients[::2]).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="vector"):
        reverse_scan(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(InputError, match="coefficients"):
        reverse_scan(torch.ones(3), torch.ones(2))
    with pytest.raises(InputError, match="float64"):
        reverse_scan(torch.ones(3), torch.ones(3, dtype=torch.float64))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=12))
def test_taking_and_placing_loss_tokens(tokens: list[tuple[bool, int]]):
    mask = torch.tensor([kept for kept, _ in tokens], dtype=torch.bool)
    ids = torch.tensor(sorted(i for _, i in tokens), dtype=torch.int64)
    values = torch.arange(1.0, 1.0 + len(tokens))
    positions = loss_positions(mask)
    kept = [index for index, is_kept in enumerate(mask.tolist()) if is_kept]
    assert (list(range(len(tokens))) if positions is None else positions.tolist()) == kept
    assert gather_loss_tokens(values, positions).tolist() == [index + 1.0 for index in kept]
    assert (
        scatter_loss_tokens(gather_loss_tokens(values, positions), positions, len(tokens)).tolist()
        == (values * mask).tolist()
    )
    following = [ids[a] == ids[b] for a, b in itertools.pairwise(kept)] + [False] * bool(kept)
    assert same_sequence(ids, positions).tolist() == following
    assert same_sequence(ids, positions).dtype == torch.bool


def test_all_tokens_taken_need_no_positions():
    assert loss_positions(torch.tensor([True, True])) is None
    assert loss_positions(torch.tensor([True, False])).tolist() == [0]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("positions", [None, torch.tensor([0, 1])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_what_is_taken_is_a_float64_copy_without_gradient(positions: Tensor | None, dtype: torch.dtype):
    values = torch.tensor([1, 2], dtype=dtype, requires_grad=dtype.is_floating_point)
    result = gather_loss_tokens(values, positions)
    assert result.dtype == torch.float64
    assert not result.requires_grad
    result.zero_()
    assert values.tolist() == [1, 2]


def test_a_mask_of_another_type_is_refused():
    with pytest.raises(InputError, match="must be bool"):
        loss_positions(torch.tensor([1, 0]))
