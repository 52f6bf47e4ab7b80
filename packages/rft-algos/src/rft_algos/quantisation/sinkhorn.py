"""Assignment by entropic optimal transport: points to codes, all codes used evenly."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import check_positive


def sinkhorn_plan(distances_NK: Tensor, *, epsilon: float, num_iterations: int = 50) -> Tensor:
    """Shares in which points go to codes, so that every code gets about N / K of the points.

    d' = (d - (max + min) / 2) / ((max - min) / 2 + 1e-5); Q = exp(-d' / epsilon), divided by its sum; then
    `num_iterations` times every row is scaled to 1 / N and every column to 1 / K; the result is N Q. Computed on
    logarithms in float64, so that no exponential overflows for a small epsilon.

    Source: Cuturi 2013, "Sinkhorn distances" (arXiv 1306.0895); centring and the order of the steps are those of
    LC-Rec (arXiv 2311.09049) and MiniOneRec (arXiv 2510.24431), where a point takes the code of its largest share.

    Args:
        distances_NK: [N, K].
        epsilon: above 0; the smaller, the nearer to the cheapest assignment.
        num_iterations: at least 1.

    Returns:
        [N, K] float64; columns sum to N / K. Example: two points at the same distances (0, 1) get equal rows.
    """
    check_positive(epsilon=epsilon, num_iterations=num_iterations)
    d_NK = distances_NK.double()
    middle, half = (d_NK.max() + d_NK.min()) / 2, (d_NK.max() - d_NK.min()) / 2
    log_NK = -(d_NK - middle) / (half + 1e-5) / epsilon
    for _ in range(num_iterations):
        log_NK = log_NK - log_NK.logsumexp(1, keepdim=True)
        # rows sum to 1 here, in place of 1 / N: a common factor that the columns' step takes away
        log_NK = log_NK - log_NK.logsumexp(0, keepdim=True)
    return (log_NK.exp()) * (d_NK.shape[0] / d_NK.shape[1])


def sinkhorn_codes(distances_NK: Tensor, *, epsilon: float, num_iterations: int = 50) -> Tensor:
    """Code of the largest share of each point: k_n = argmax_k Q_nk, the first of equals.

    Source: MiniOneRec (arXiv 2510.24431), as `sinkhorn_plan`.

    Args:
        distances_NK: [N, K].
        epsilon: above 0.
        num_iterations: at least 1.

    Returns:
        [N] int64. Example: points with the distances (0, 0.1) and (0, 0.9) take the codes 1 and 0 for a small epsilon.
    """
    return torch.argmax(sinkhorn_plan(distances_NK, epsilon=epsilon, num_iterations=num_iterations), dim=1)
