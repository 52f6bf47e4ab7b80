"""Balanced k-means: equal sizes, at nearly the least cost."""

import itertools
from inspect import signature

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.quantisation import balanced
from rft_algos.quantisation.balanced import assign_to_places, balanced_kmeans, even_capacities
from rft_algos.quantisation.kmeans import cluster_means, squared_distances


def points(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed))


def test_places_add_up_and_the_most_wanted_have_one_more() -> None:
    assert even_capacities(7, torch.tensor([1, 5, 1])).tolist() == [2, 3, 2]
    assert even_capacities(8, torch.tensor([1, 5, 1])).tolist() == [3, 3, 2]


@pytest.mark.parametrize("seed", range(4))
def test_the_assignment_costs_little_more_than_the_cheapest(seed: int) -> None:
    costs, places = points(6, 3, seed).square(), torch.tensor([1, 2, 3])
    found = assign_to_places(costs, places)
    assert torch.bincount(found, minlength=3).tolist() == [1, 2, 3]
    orders = set(itertools.permutations([0, 1, 1, 2, 2, 2]))
    least = min(sum(float(costs[n, k]) for n, k in enumerate(order)) for order in orders)
    cost = float(costs[torch.arange(6), found].sum())
    assert cost <= least + 6 * 0.02 * float(costs.mean()) + 1e-6


def test_the_example_is_the_cheapest() -> None:
    costs = torch.tensor([[0.0, 1], [0, 3], [2, 2]])
    assert assign_to_places(costs, torch.tensor([1, 2])).tolist() == [1, 0, 1]


def test_clusters_have_equal_sizes_and_their_means() -> None:
    x = points(63, 6)
    found = balanced_kmeans(x, 6, key=5, max_iterations=3)
    assert sorted(torch.bincount(found.codes_N).tolist()) == [10] * 3 + [11] * 3
    torch.testing.assert_close(found.centres_KD, cluster_means(x, found.codes_N, 6)[0])
    start = balanced_kmeans(x, 6, key=5, max_iterations=1)
    assert found.inertia < start.inertia
    drawn = torch.arange(63) % 6
    assert found.inertia < float((x - cluster_means(x, drawn, 6)[0][drawn]).square().sum())
    assert squared_distances(x, found.centres_KD).shape == (63, 6)


def test_places_for_others_are_refused() -> None:
    with pytest.raises(InputError, match="for 3 points"):
        assign_to_places(torch.zeros(3, 2), torch.tensor([1, 1]))


def test_an_assignment_does_not_depend_on_the_unit_of_the_costs() -> None:
    costs = torch.rand(48, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    places = torch.tensor([10, 10, 10, 9, 9])
    # a power of two changes no digit of any price
    assert torch.equal(assign_to_places(costs, places), assign_to_places(costs * 2.0**-10, places))


def test_points_that_are_left_take_one_place_each() -> None:
    values = -torch.tensor([[0.0, 1.0]]).expand(4, 2)
    codes = torch.full((4,), -1)
    assert balanced._placed_left(codes, values, torch.tensor([3, 1])).tolist() == [0, 0, 0, 1]


def test_it_ends_after_thirty_rounds_or_at_a_gain_below_a_thousandth() -> None:
    assert signature(balanced_kmeans).parameters["max_iterations"].default == 30
    assert balanced._LEAST_GAIN == 1e-3
