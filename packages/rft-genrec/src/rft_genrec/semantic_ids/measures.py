"""Measures of semantic IDs: collisions, use of the codes, reconstruction, and how alike neighbours are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_algos.quantisation.kmeans import squared_distances
from rft_genrec.semantic_ids.codebooks import Quantiser

_ROWS = 512


@dataclass(frozen=True, slots=True)
class CodebookUse:
    """Use of the codes of one level."""

    codes: int
    used: int
    perplexity: float
    """exp(entropy) of the codes over the items: the number of codes if all were used evenly."""
    largest: int
    """Items of the most frequent code."""


def level_use(codes_N: Tensor, num_codes: int) -> CodebookUse:
    """Measure how the items use one level."""
    counts_K = torch.bincount(codes_N, minlength=num_codes).double()
    shares = counts_K[counts_K > 0] / counts_K.sum()
    entropy = float(-(shares * shares.log()).sum())
    return CodebookUse(num_codes, len(shares), float(torch.tensor(entropy).exp()), int(counts_K.max()))


def unexplained_share(points_ND: Tensor, quantiser: Quantiser, mean_D: Tensor) -> float:
    """Return sum_n ||x_n - x'_n||^2 / sum_n ||x_n - mean||^2, x' what the codes stand for."""
    rebuilt_ND = quantiser.reconstruct(quantiser.codes(points_ND))
    variation = float((points_ND - mean_D).double().square().sum())
    return float((points_ND - rebuilt_ND).double().square().sum()) / variation if variation else 0.0


def nearest_items(points_ND: Tensor, k: int) -> Tensor:
    """Return [N, k] int64: the nearest other items of each item, the nearest first."""
    found = list[Tensor]()
    for start in range(0, len(points_ND), _ROWS):
        distances_RN = squared_distances(points_ND[start : start + _ROWS], points_ND)
        rows = torch.arange(len(distances_RN), device=points_ND.device)
        distances_RN[rows, rows + start] = torch.inf
        found.append(distances_RN.topk(k, largest=False).indices)
    return torch.cat(found)


def shared_prefixes(codes_NL: Tensor, neighbours_NK: Tensor, num_levels: int) -> tuple[float, float]:
    """Return the share of neighbours with the same first codes, and that of all other items: what chance gives."""
    _, prefix_N = codes_NL[:, :num_levels].unique(dim=0, return_inverse=True)
    shared = float((prefix_N[neighbours_NK] == prefix_N[:, None]).double().mean())
    counts = torch.bincount(prefix_N).double()
    num = len(prefix_N)
    return shared, float((counts * (counts - 1)).sum() / (num * (num - 1)))


def histogram(codes_N: Tensor, num_codes: int) -> Sequence[int]:
    """Return the items of each code, the most frequent first."""
    return torch.bincount(codes_N, minlength=num_codes).sort(descending=True).values.tolist()
