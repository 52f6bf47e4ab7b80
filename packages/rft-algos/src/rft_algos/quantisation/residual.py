"""Residual quantisation: a vector as the sum of one code vector a level, each level quantising what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.quantisation.kmeans import Clusters, kmeans, nearest_centres
from rft_core.keyed_random import derive_key

Cluster = Callable[[Tensor, int, int], Clusters]
"""`(points_ND, K, key) -> Clusters`: the clustering of one level."""


class ResidualFit(NamedTuple):
    """Codebooks from the coarsest level to the finest, and the codes of the points that they were fitted to."""

    codebooks: tuple[Tensor, ...]
    """Of level l: [K_l, D]."""
    codes_NL: Tensor
    inertias: tuple[float, ...]
    """Squared norms of what is left after each level, summed over the points."""
    num_revived: tuple[int, ...]


def residual_kmeans(
    points_ND: Tensor, sizes: Sequence[int], *, key: int, cluster: Cluster | None = None
) -> ResidualFit:
    """Fit codebooks level by level: r_1 = x; k_l = code of r_l among the centres of all r_l; r_{l+1} = r_l - c_{l, k_l}.

    Source: Chen, Guan and Wang 2010, "Approximate nearest neighbor search by residual vector quantization"; greedy,
    with k-means at each level, as semantic IDs are made in Rajput et al. 2023 (arXiv 2305.05065, section 3.1, ablation).

    Args:
        points_ND: [N, D].
        sizes: K_1 .. K_L, each at most N.
        key: of all levels.
        cluster: clustering of a level; None = `kmeans`.

    Returns:
        `ResidualFit`. Example: the points 0, 1, 8, 9 with sizes 2, 2 have the codebooks (0.5, 8.5) and (-0.5, 0.5) in
        some order, and nothing is left.
    """
    if not sizes:
        refuse("sizes is empty: at least one level is needed")
    cluster = cluster or _plain
    left_ND, fits = points_ND, list[Clusters]()
    inertias = list[float]()
    for level, size in enumerate(sizes):
        fits.append(cluster(left_ND, size, derive_key(key, "residual-level", level)))
        left_ND = left_ND - fits[-1].centres_KD[fits[-1].codes_N]
        inertias.append(float(left_ND.double().square().sum()))
    return ResidualFit(
        tuple(fit.centres_KD for fit in fits),
        torch.stack([fit.codes_N for fit in fits], dim=1),
        tuple(inertias),
        tuple(fit.num_revived for fit in fits),
    )


def residual_codes(points_ND: Tensor, codebooks: Sequence[Tensor]) -> Tensor:
    """Codes of points by given codebooks: k_l = argmin_k ||r_l - c_{l,k}||^2, r_{l+1} = r_l - c_{l,k_l}, r_1 = x.

    Source: Chen, Guan and Wang 2010, "Approximate nearest neighbor search by residual vector quantization".

    Args:
        points_ND: [N, D].
        codebooks: of level l [K_l, D].

    Returns:
        [N, L] int64. Example: the point 9 by the codebooks (0.5, 8.5) and (-0.5, 0.5) has the codes (1, 1).
    """
    left_ND, codes = points_ND, list[Tensor]()
    for codebook_KD in codebooks:
        codes.append(nearest_centres(left_ND, codebook_KD)[0])
        left_ND = left_ND - codebook_KD[codes[-1]]
    return torch.stack(codes, dim=1)


def reconstruct(codes_NL: Tensor, codebooks: Sequence[Tensor]) -> Tensor:
    """Sum of the code vectors: x_n ~ sum_l c_{l, k_nl}.

    Source: Chen, Guan and Wang 2010, "Approximate nearest neighbor search by residual vector quantization".

    Args:
        codes_NL: [N, L] int64; of fewer levels than there are codebooks, the coarse ones.
        codebooks: of level l [K_l, D].

    Returns:
        [N, D]. Example: the codes (1, 1) of the codebooks (0.5, 8.5) and (-0.5, 0.5) give 9.
    """
    parts = [codebook_KD[codes_N] for codebook_KD, codes_N in zip(codebooks, codes_NL.unbind(1), strict=False)]
    return torch.stack(parts).sum(0)


def _plain(points_ND: Tensor, num: int, key: int) -> Clusters:
    return kmeans(points_ND, num, key=key)
