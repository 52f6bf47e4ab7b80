"""Rows of numbers as one tensor."""

from __future__ import annotations

import math

import pytest
import torch

from rft_trainer.records.flat_numbers import behind_zeros, flat_tensor

FLOATS = [(0.1, -0.0, math.inf), (), (1e300, 5e-324, -math.inf, 3.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    wanted = torch.tensor([number for row in FLOATS for number in row], dtype=dtype)
    got = flat_tensor(FLOATS, dtype)
    assert got.dtype == dtype
    assert got.numpy().tobytes() == wanted.numpy().tobytes()


def test_nan_stays_nan() -> None:
    assert flat_tensor([(math.nan,)], torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_whole_numbers_and_marks(dtype: torch.dtype) -> None:
    assert flat_tensor([(3, -1), (2**31 - 1,)], dtype).tolist() == [3, -1, 2**31 - 1]
    assert flat_tensor([(True, False), (True,)], torch.bool).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_no_rows_are_an_empty_tensor(dtype: torch.dtype) -> None:
    assert flat_tensor([], dtype).shape == (0,)
    assert flat_tensor([()], dtype).dtype == dtype


def test_rows_stand_behind_their_zeros() -> None:
    assert behind_zeros([(1, (2.0, 3.0)), (0, (4.0,)), (2, ())], torch.float32).tolist() == [0, 2, 3, 4, 0, 0]
    assert behind_zeros([], torch.float32).shape == (0,)


def test_the_memory_is_its_own() -> None:
    row = (1.0, 2.0)
    flat_tensor([row], torch.float32).zero_()
    assert row == (1.0, 2.0)
