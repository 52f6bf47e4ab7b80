"""Entropic optimal transport of points to codes."""

import math

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.quantisation.sinkhorn import sinkhorn_codes, sinkhorn_plan


def by_hand(rows: list[list[float]], epsilon: float, num_iterations: int) -> list[list[float]]:
    """The published steps one after another, on plain numbers."""
    flat = [value for row in rows for value in row]
    middle, half = (max(flat) + min(flat)) / 2, (max(flat) - min(flat)) / 2
    q = [[math.exp(-(value - middle) / (half + 1e-5) / epsilon) for value in row] for row in rows]
    total = sum(map(sum, q))
    q = [[value / total for value in row] for row in q]
    n, k = len(q), len(q[0])
    for _ in range(num_iterations):
        q = [[value / sum(row) / n for value in row] for row in q]
        sums = [sum(row[c] for row in q) for c in range(k)]
        q = [[value / sums[c] / k for c, value in enumerate(row)] for row in q]
    return [[value * n for value in row] for row in q]


@pytest.mark.parametrize("num_iterations", [1, 3, 50])
def test_the_plan_is_that_of_the_published_steps(num_iterations: int) -> None:
    rows = [[0.1, 0.9, 0.4], [0.3, 0.2, 0.8], [0.7, 0.5, 0.6], [0.0, 0.1, 0.2]]
    expected = torch.tensor(by_hand(rows, 0.5, num_iterations), dtype=torch.float64)
    given = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(sinkhorn_plan(given, epsilon=0.5, num_iterations=num_iterations), expected)


def test_codes_are_used_evenly_and_a_small_epsilon_does_not_overflow() -> None:
    distances = torch.rand(60, 6, generator=torch.Generator().manual_seed(1))
    plan = sinkhorn_plan(distances, epsilon=0.003)
    assert plan.isfinite().all()
    torch.testing.assert_close(plan.sum(0), torch.full((6,), 10.0, dtype=torch.float64))
    assert sinkhorn_codes(torch.tensor([[0, 0.1], [0, 0.9]]), epsilon=0.05).tolist() == [1, 0]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_an_epsilon_that_is_not_positive_is_refused(epsilon: float) -> None:
    with pytest.raises(InputError, match="epsilon"):
        sinkhorn_plan(torch.zeros(2, 2), epsilon=epsilon)
