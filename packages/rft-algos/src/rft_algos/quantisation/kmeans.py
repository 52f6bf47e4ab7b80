"""k-means by Lloyd's algorithm from a k-means++ start, as a function of points and key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive, refuse
from rft_core.keyed_random import derive_key, uniforms

_ROWS = 2048
"""Points whose distances to all centres are in memory at once, small enough for the caches of a core."""
_START_ROWS, _START_ROWS_PER_CENTRE = 4096, 16
"""Points that the start of k-means is chosen among: at least, and for each centre."""


class Clusters(NamedTuple):
    """Centres, and the one of each point."""

    centres_KD: Tensor
    codes_N: Tensor
    """[N] int64: number of each point's centre."""
    inertia: float
    """Sum over the points of the squared distance to their centre."""
    num_iterations: int
    num_revived: int
    """Centres that had lost all points and were moved to one, over all iterations."""


def squared_distances(points_ND: Tensor, centres_KD: Tensor) -> Tensor:
    """Squared Euclidean distance of every point to every centre.

    d_nk = ||x_n||^2 - 2 x_n . c_k + ||c_k||^2, at least 0: one matrix product in place of N x K x D differences.

    Source: the binomial formula; it loses digits where a distance is small beside the norms.

    Args:
        points_ND: [N, D].
        centres_KD: [K, D].

    Returns:
        [N, K]. Example: points (0, 0) and (3, 4) and the centre (0, 0) give 0 and 25.
    """
    norms_N = points_ND.square().sum(1)
    return (_without_norms(points_ND, centres_KD) + norms_N[:, None]).clamp(min=0)


def nearest_centres(points_ND: Tensor, centres_KD: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest centre of every point: k_n = argmin_k ||x_n - c_k||^2, the first of equals.

    Source: Lloyd 1982, "Least squares quantization in PCM", the partition that is best for given centres.

    Args:
        points_ND: [N, D].
        centres_KD: [K, D].

    Returns:
        [N] int64 codes and [N] squared distances. Example: points 0 and 9 and centres 1 and 8 give (0, 1), (1, 1).
    """
    codes, distances = list[Tensor](), list[Tensor]()
    for start in range(0, len(points_ND), _ROWS):
        rows_RD = points_ND[start : start + _ROWS]
        least_R, codes_R = _without_norms(rows_RD, centres_KD).min(1)
        codes.append(codes_R)
        distances.append((least_R + rows_RD.square().sum(1)).clamp(min=0))
    return torch.cat(codes), torch.cat(distances)


def kmeans_plus_plus(points_ND: Tensor, num: int, *, key: int) -> Tensor:
    """Start of k-means: points drawn one after another, far ones more often.

    The first is drawn evenly. For each further one 2 + ln K candidates are drawn, x_n with probability d_n / sum_m d_m,
    d_n the squared distance of x_n to the nearest point chosen so far; the candidate is chosen that leaves the least
    sum of distances. Once every distance is 0 the rest are drawn evenly.

    Source: Arthur and Vassilvitskii 2007, "k-means++: the advantages of careful seeding", section 2.2; the candidates
    are those of their own program, and of scikit-learn.

    Args:
        points_ND: [N, D].
        num: K, at most N.
        key: of the draws, as `rft_core.keyed_random.derive_key` gives it.

    Returns:
        [K] int64 numbers of points. Example: of the points 0, 0 and 5 and K = 2 one is 5, whatever the key.
    """
    total = len(points_ND)
    if not 1 <= num <= total:
        refuse(f"num = {num} of {total} points")
    num_candidates = 2 + int(math.log(num))
    draws = uniforms([key], num * num_candidates).reshape(num, num_candidates).to(points_ND.device)
    chosen = [min(int(draws[0, 0] * total), total - 1)]
    norms_N = points_ND.square().sum(1)
    least_N = _to_some(points_ND, norms_N, chosen)[:, 0]
    for draws_C in draws[1:]:
        sums_N = least_N.double().cumsum(0)
        if float(sums_N[-1]) > 0:
            candidates_C = torch.searchsorted(sums_N, draws_C * sums_N[-1], right=True).clamp(max=total - 1)
        else:
            candidates_C = (draws_C * total).long().clamp(max=total - 1)
        left_NC = torch.minimum(least_N[:, None], _to_some(points_ND, norms_N, candidates_C))
        best = int(left_NC.sum(0).argmin())
        least_N = left_NC[:, best]
        chosen.append(int(candidates_C[best]))
    return torch.tensor(chosen, device=points_ND.device)


def kmeans(points_ND: Tensor, num: int, *, key: int, max_iterations: int = 100, tolerance: float = 1e-4) -> Clusters:
    """Cluster points around K centres.

    minimise sum_n ||x_n - c_{k_n}||^2: in turn every point takes its nearest centre, and every centre becomes the mean
    of its points. The start is that of `kmeans_plus_plus`, among max(4096, 16 K) of the points, drawn by the key, where
    there are more: its K passes over the points would take longer than all that follows. A centre without points moves
    to the point that is farthest from its own centre; the m-th of several takes the m-th farthest. It ends when no code
    changed, or when the centres moved by at most `tolerance` x (mean variance of a dimension), summed over their
    squares.

    Source: Lloyd 1982, "Least squares quantization in PCM"; the end and the revival are those of scikit-learn 1.7.

    Args:
        points_ND: [N, D], finite.
        num: K, at most N.
        key: of the start.
        max_iterations: at least 1.
        tolerance: 0 or more.

    Returns:
        `Clusters`, whose codes are those of the returned centres. Example: the points 0, 1, 8, 9 and K = 2 have the
        centres 0.5 and 8.5 and the inertia 1.
    """
    check_positive(max_iterations=max_iterations)
    some_SD = _drawn(points_ND, max(_START_ROWS, _START_ROWS_PER_CENTRE * num), derive_key(key, "points of the start"))
    centres_KD = some_SD[kmeans_plus_plus(some_SD, num, key=derive_key(key, "kmeans++"))]
    least_move = tolerance * float(points_ND.var(0, correction=0).mean())
    codes_N, distances_N = nearest_centres(points_ND, centres_KD)
    num_revived = num_iterations = 0
    while num_iterations < max_iterations:
        num_iterations += 1
        moved_KD, revived = _updated(points_ND, codes_N, distances_N, centres_KD)
        num_revived += revived
        move = float((moved_KD - centres_KD).square().sum())
        before_N, centres_KD = codes_N, moved_KD
        codes_N, distances_N = nearest_centres(points_ND, centres_KD)
        if torch.equal(before_N, codes_N) or move <= least_move:
            break
    return Clusters(centres_KD, codes_N, float(distances_N.double().sum()), num_iterations, num_revived)


def cluster_means(points_ND: Tensor, codes_N: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Mean of the points of every code: c_k = sum_{n: k_n = k} x_n / #{n: k_n = k}; 0 where a code has none.

    Source: Lloyd 1982, "Least squares quantization in PCM", the centres that are best for a given partition.

    Args:
        points_ND: [N, D].
        codes_N: [N] int64 in [0, K).
        num: K.

    Returns:
        [K, D] means and [K] int64 counts. Example: the points 1, 3 and 8 with codes 0, 0, 1 have the means 2 and 8.
    """
    counts_K = torch.bincount(codes_N, minlength=num)
    if points_ND.is_cuda:
        # sums by atomic additions differ from call to call; a product of matrices does not
        sums_KD = points_ND.new_zeros(num, points_ND.shape[1])
        for start in range(0, len(points_ND), 65536):
            some_N = codes_N[start : start + 65536]
            members_KN = torch.nn.functional.one_hot(some_N, num).to(points_ND.dtype).T
            sums_KD += members_KN @ points_ND[start : start + 65536]
    else:
        sums_KD = points_ND.new_zeros(num, points_ND.shape[1]).index_add_(0, codes_N, points_ND)
    return sums_KD / counts_K.clamp(min=1)[:, None], counts_K


def _drawn(points_ND: Tensor, num: int, key: int) -> Tensor:
    """So many of the points in their order, or all where there are no more."""
    if len(points_ND) <= num:
        return points_ND
    chosen = uniforms([key], len(points_ND)).flatten().argsort(stable=True)[:num]
    return points_ND[chosen.sort().values.to(points_ND.device)]


def _to_some(points_ND: Tensor, norms_N: Tensor, places: Sequence[int] | Tensor) -> Tensor:
    """Squared distances [N, C] to some of the points; 0 of a point to itself, whatever is rounded."""
    chosen_CD = points_ND[places]
    distances_NC = (_without_norms(points_ND, chosen_CD) + norms_N[:, None]).clamp_(min=0)
    distances_NC[places, torch.arange(len(places), device=points_ND.device)] = 0
    return distances_NC


def _without_norms(points_ND: Tensor, centres_KD: Tensor) -> Tensor:
    """Squared distances less the squared norm of the point, which decides nothing about the nearest."""
    return torch.addmm(centres_KD.square().sum(1), points_ND, centres_KD.T, alpha=-2)


def _updated(points_ND: Tensor, codes_N: Tensor, distances_N: Tensor, centres_KD: Tensor) -> tuple[Tensor, int]:
    means_KD, counts_K = cluster_means(points_ND, codes_N, len(centres_KD))
    empty = (counts_K == 0).nonzero().flatten()
    if not len(empty):
        return means_KD, 0
    farthest = distances_N.argsort(descending=True, stable=True)[: len(empty)]
    means_KD[empty] = points_ND[farthest]
    return means_KD, len(empty)
