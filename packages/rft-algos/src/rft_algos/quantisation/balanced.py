"""Balanced k-means: clusters of equal sizes, by an assignment of points to the places that each centre has."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, refuse
from rft_algos.quantisation.kmeans import Clusters, cluster_means, kmeans_plus_plus, nearest_centres, squared_distances
from rft_core.keyed_random import derive_key

_MOST_ROUNDS = 1000
_EPSILON = 0.02
"""Smallest raise of a price as a share of the mean cost: a quarter of it costs twice the time and gains 0.03 % on the
3,686 vectors of MiniLM that docs/genrec/ids.md measures."""
_LEAST_GAIN = 1e-3


def even_capacities(num: int, wanted_K: Tensor) -> Tensor:
    """Places of every centre that add up to the points: N div K each, one more for the N mod K most wanted.

    Source: the sizes are those of MiniOneRec's uniform variant (arXiv 2510.24431), which gives the further places to
    the first centres.

    Args:
        num: N.
        wanted_K: [K] how many points would like each centre; of equals the first is more wanted.

    Returns:
        [K] int64. Example: 7 points and wishes (1, 5, 1) give (2, 3, 2).
    """
    num_codes = len(wanted_K)
    places_K = torch.full_like(wanted_K, num // num_codes, dtype=torch.int64)
    places_K[wanted_K.argsort(descending=True, stable=True)[: num % num_codes]] += 1
    return places_K


def assign_to_places(costs_NK: Tensor, places_K: Tensor) -> Tensor:
    """Assignment of points to centres with as many places as there are points: near the cheapest.

    minimise sum_n costs[n, k_n] so that centre k has places[k] points. By auction: centres have prices; every point
    without a place bids for the centre of its best value v = -cost - price, and offers the price at which its second
    best would be as good, plus epsilon; a centre keeps its highest offers, and its price is the lowest of them once it
    is full. The result costs at most N x epsilon more than the cheapest, where epsilon is 0.02 of the mean cost; a
    point that is left after 1,000 rounds takes the cheapest centre with a place.

    Source: Bertsekas and Castanon 1989, "The auction algorithm for the transportation problem", with all bids of a
    round at once.

    Args:
        costs_NK: [N, K], 0 or more.
        places_K: [K] int64 that sum to N.

    Returns:
        [N] int64. Example: costs (0, 1), (0, 3), (2, 2) and places (1, 2) give 1, 0, 1.
    """
    if int(places_K.sum()) != len(costs_NK):
        refuse(f"places sum to {int(places_K.sum())} for {len(costs_NK)} points")
    return _auction(costs_NK, places_K, torch.zeros(costs_NK.shape[1], dtype=torch.float64))


def balanced_kmeans(points_ND: Tensor, num: int, *, key: int, max_iterations: int = 30) -> Clusters:
    """Cluster points around K centres, of which each has N / K points, rounded down or up.

    minimise sum_n ||x_n - c_{k_n}||^2 as `kmeans`, where the nearest centre is replaced by `assign_to_places` with
    `even_capacities`. It ends when no code changed, or the sum falls by less than a
    thousandth. No centre can lose all points.

    Source: Bradley, Bennett and Demiriz 2000, "Constrained k-means clustering", with an auction in
    place of a linear program; as a semantic ID in MiniOneRec (arXiv 2510.24431).

    Args:
        points_ND: [N, D], finite.
        num: K, at most N.
        key: of the k-means++ start.
        max_iterations: at least 1.

    Returns:
        `Clusters`, whose codes are those of the last assignment: a point's centre need not be its nearest. Example:
        the points 0, 1, 2, 9 and K = 2 have the centres 0.5 and 5.5.
    """
    check_positive(max_iterations=max_iterations)
    centres_KD = points_ND[kmeans_plus_plus(points_ND, num, key=derive_key(key, "kmeans++"))]
    prices_K = torch.zeros(num, dtype=torch.float64)
    best: Clusters | None = None
    iteration = 0
    for iteration in range(1, max_iterations + 1):
        wanted_K = torch.bincount(nearest_centres(points_ND, centres_KD)[0], minlength=num)
        places_K = even_capacities(len(points_ND), wanted_K)
        # from the prices of the last assignment, which was of nearly the same costs
        codes_N = _auction(squared_distances(points_ND, centres_KD), places_K, prices_K)
        centres_KD, _ = cluster_means(points_ND, codes_N, num)
        inertia = float((points_ND - centres_KD[codes_N]).double().square().sum())
        if best is not None and (torch.equal(codes_N, best.codes_N) or inertia >= best.inertia * (1 - _LEAST_GAIN)):
            break
        best = Clusters(centres_KD, codes_N, inertia, iteration, 0)
    assert best is not None, "the first iteration has nothing to be compared with"
    return best._replace(num_iterations=iteration)


def _auction(costs_NK: Tensor, places_K: Tensor, prices_K: Tensor) -> Tensor:
    """One auction from the prices that are given, which are raised in place; on the CPU, for its small steps."""
    values_NK, places_K = -costs_NK.double().cpu(), places_K.cpu()
    epsilon = _EPSILON * (float(-values_NK.mean()) or 1.0)
    num, num_codes = values_NK.shape
    codes_N, offers_N = torch.full((num,), -1), torch.zeros(num, dtype=torch.float64)
    for _ in range(_MOST_ROUNDS):
        waiting = (codes_N < 0).nonzero().flatten()
        if not len(waiting):
            return codes_N.to(costs_NK.device)
        top = (values_NK[waiting] - prices_K).topk(min(2, num_codes), dim=1)
        bids = top.indices[:, 0]
        codes_N[waiting] = bids
        offers_N[waiting] = prices_K[bids] + top.values[:, 0] - top.values[:, -1] + epsilon
        _keep_highest(codes_N, offers_N, places_K, prices_K)
    return _placed_left(codes_N, values_NK, places_K).to(costs_NK.device)


def _keep_highest(codes_N: Tensor, offers_N: Tensor, places_K: Tensor, prices_K: Tensor) -> None:
    """Let every centre keep as many offers as it has places, and raise the prices of the full ones."""
    holders = (codes_N >= 0).nonzero().flatten()
    # by centre, the highest offer first
    order = holders[offers_N[holders].argsort(descending=True, stable=True)]
    order = order[codes_N[order].argsort(stable=True)]
    sorted_codes = codes_N[order]
    counts_K = torch.bincount(sorted_codes, minlength=len(places_K))
    starts_K = counts_K.cumsum(0) - counts_K
    rank = torch.arange(len(order)) - starts_K[sorted_codes]
    codes_N[order[rank >= places_K[sorted_codes]]] = -1
    full = ((counts_K >= places_K) & (places_K > 0)).nonzero().flatten()
    lowest = order[starts_K[full] + places_K[full] - 1]
    prices_K[full] = torch.maximum(prices_K[full], offers_N[lowest])


def _placed_left(codes_N: Tensor, values_NK: Tensor, places_K: Tensor) -> Tensor:
    left_K = places_K - torch.bincount(codes_N[codes_N >= 0], minlength=len(places_K))
    for place in (codes_N < 0).nonzero().flatten():
        point = int(place)
        code = int(values_NK[point].masked_fill(left_K <= 0, -torch.inf).argmax())
        codes_N[point] = code
        left_K[code] -= 1
    return codes_N
