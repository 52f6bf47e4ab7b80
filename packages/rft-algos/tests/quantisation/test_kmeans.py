"""k-means: Lloyd's algorithm from a k-means++ start."""

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.quantisation.kmeans import (
    cluster_means,
    kmeans,
    kmeans_plus_plus,
    nearest_centres,
    squared_distances,
)

LINE = torch.tensor([[0.0], [1.0], [8.0], [9.0]])


def points(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed))


def test_distances_are_those_of_differences() -> None:
    x, c = points(50, 7).double(), points(9, 7, 1).double()
    by_hand = (x[:, None] - c[None]).square().sum(2)
    torch.testing.assert_close(squared_distances(x, c), by_hand)
    codes, least = nearest_centres(x, c)
    torch.testing.assert_close(least, by_hand.min(1).values)
    assert codes.tolist() == by_hand.argmin(1).tolist()
    assert squared_distances(torch.tensor([[0.0, 0], [3, 4]]), torch.zeros(1, 2)).flatten().tolist() == [0, 25]


@pytest.mark.parametrize("key", range(5))
def test_two_pairs_are_two_clusters(key: int) -> None:
    found = kmeans(LINE, 2, key=key)
    assert sorted(found.centres_KD.flatten().tolist()) == [0.5, 8.5]
    assert found.inertia == 1
    assert found.codes_N[0] == found.codes_N[1] != found.codes_N[2] == found.codes_N[3]


def test_the_start_draws_far_points() -> None:
    spread = torch.tensor([[0.0]] * 9 + [[5.0]])
    for key in range(6):
        assert sorted(spread[kmeans_plus_plus(spread, 2, key=key)].flatten().tolist()) == [0, 5]
    # where all distances are 0 the rest is drawn evenly
    assert len(kmeans_plus_plus(torch.zeros(4, 2), 3, key=1)) == 3


def test_the_result_is_a_function_of_the_key_and_better_than_its_start() -> None:
    x = points(400, 5)
    found, again, other = kmeans(x, 12, key=3), kmeans(x, 12, key=3), kmeans(x, 12, key=4)
    assert torch.equal(found.centres_KD, again.centres_KD)
    assert not torch.equal(found.centres_KD, other.centres_KD)
    assert found.inertia < kmeans(x, 12, key=3, max_iterations=1).inertia
    # centres are the means of their points, points have their nearest centre: Lloyd's fixed point
    exact = kmeans(x, 12, key=3, tolerance=0.0)
    means, counts = cluster_means(x, exact.codes_N, 12)
    torch.testing.assert_close(means, exact.centres_KD)
    assert int(counts.sum()) == 400
    assert torch.equal(nearest_centres(x, means)[0], exact.codes_N)


def test_of_many_points_some_are_the_start() -> None:
    centres = 100 * torch.eye(8)
    x = centres.repeat_interleave(1000, 0) + points(8000, 8)
    found, again = kmeans(x, 8, key=5), kmeans(x, 8, key=5)
    assert torch.equal(found.centres_KD, again.centres_KD)
    # every point is assigned, and each of the far groups has a centre of its own
    assert found.codes_N.bincount().tolist() == [1000] * 8
    order = found.centres_KD.argmax(1)
    torch.testing.assert_close(found.centres_KD, centres[order], atol=0.2, rtol=0)


def test_a_centre_without_points_moves_to_the_farthest() -> None:
    # two equal points draw two equal centres, of which the second has no points
    x = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0]])
    found = kmeans(x, 4, key=0, max_iterations=3)
    assert found.inertia == 0
    assert found.num_revived > 0


@pytest.mark.parametrize("num", [0, 5])
def test_more_centres_than_points_are_refused(num: int) -> None:
    with pytest.raises(InputError, match="of 4 points"):
        kmeans(LINE, num, key=0)
