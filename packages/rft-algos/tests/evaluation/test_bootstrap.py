"""Bootstrap intervals: centred on the mean, as wide as theory says, paired over columns."""

from __future__ import annotations

import math

import pytest
import torch

from rft_algos.evaluation.bootstrap import bootstrap_intervals, resampled_means
from rft_algos.input_checks import InputError
from rft_core.keyed_random import uniforms

VALUES = [float(i % 4 == 0) for i in range(400)]


def test_every_mean_is_that_of_a_sample_of_the_rows() -> None:
    means = resampled_means([[1.0, 0.0, 0.0]], key=3, num_draws=50)
    assert means.shape == (50, 1)
    assert set((means * 3).round().flatten().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert torch.allclose(means * 3, (means * 3).round())


def test_a_draw_takes_the_rows_that_its_key_says() -> None:
    rows = (uniforms([11], 6)[0] * 3).long().reshape(2, 3)
    values = torch.tensor([5.0, 7.0, 11.0], dtype=torch.float64)
    assert resampled_means([values.tolist()], key=11, num_draws=2)[:, 0].tolist() == pytest.approx(
        values[rows].mean(1).tolist()
    )


def test_the_interval_is_as_wide_as_the_standard_error_says() -> None:
    [found] = bootstrap_intervals([VALUES], key=1, num_draws=2000)
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert found.estimate == 0.25
    assert found.num == 400
    assert found.low == pytest.approx(0.25 - half, abs=0.008)
    assert found.high == pytest.approx(0.25 + half, abs=0.008)


def test_columns_share_their_rows() -> None:
    means = resampled_means([VALUES, [value + 1 for value in VALUES]], key=2, num_draws=20)
    assert torch.allclose(means[:, 1] - means[:, 0], torch.ones(20, dtype=torch.float64))


def test_the_key_alone_decides() -> None:
    again = [bootstrap_intervals([VALUES], key=key, num_draws=100)[0].low for key in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


@pytest.mark.parametrize("columns", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_columns_have_equally_many_rows(columns: list[list[float]]) -> None:
    with pytest.raises(InputError, match="rows"):
        resampled_means(columns, key=0)


def test_levels_and_draws_are_checked() -> None:
    with pytest.raises(InputError, match="level"):
        bootstrap_intervals([[1.0]], key=0, level=1.0)
    with pytest.raises(InputError, match="num_draws"):
        resampled_means([[1.0]], key=0, num_draws=0)
