"""This project's quantisers of vectors and measures of rankings, called as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, leaf, slope
from conformance.adapters.packed import computes
from rft_algos.evaluation import bootstrap, ranking
from rft_algos.quantisation import balanced, kmeans, residual, sinkhorn, vq_loss


def _matrix(case: Case, name: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(case["inputs"][name], dtype=dtype)


def _codebooks(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(codebook, dtype=dtype) for codebook in case["inputs"]["codebooks"]]


def _sorted(values_KD: Tensor) -> list[list[float]]:
    """Codes have no order of their own."""
    return sorted(values_KD.tolist())


def _clusters(found: kmeans.Clusters) -> dict[str, Any]:
    return {"centres": _sorted(found.centres_KD), "inertia": found.inertia}


@computes("quantisation", "squared_distances")
def squared_distances(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """All distances."""
    points_ND, centres_KD = _matrix(case, "points", dtype), _matrix(case, "centres", dtype)
    return {"distances": kmeans.squared_distances(points_ND, centres_KD).tolist()}


@computes("quantisation", "nearest_centres")
def nearest_centres(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Codes and their distances."""
    codes_N, distances_N = kmeans.nearest_centres(_matrix(case, "points", dtype), _matrix(case, "centres", dtype))
    return {"codes": codes_N.tolist(), "distances": distances_N.tolist()}


@computes("quantisation", "cluster_means")
def cluster_means(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Means and counts."""
    codes_N = torch.tensor(case["inputs"]["codes"])
    means_KD, counts_K = kmeans.cluster_means(_matrix(case, "points", dtype), codes_N, case["params"]["num"])
    return {"means": means_KD.tolist(), "counts": counts_K.tolist()}


@computes("quantisation", "kmeans")
def clusters(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Lloyd's algorithm."""
    return _clusters(kmeans.kmeans(_matrix(case, "points", dtype), **case["params"]))


@computes("quantisation", "balanced_kmeans")
def balanced_clusters(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The same with equal sizes."""
    return _clusters(balanced.balanced_kmeans(_matrix(case, "points", dtype), **case["params"]))


@computes("quantisation", "kmeans_plus_plus")
def start(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The points that a start chooses."""
    points_ND = _matrix(case, "points", dtype)
    return {"chosen": _sorted(points_ND[kmeans.kmeans_plus_plus(points_ND, **case["params"])])}


@computes("quantisation", "even_capacities")
def even_capacities(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Places of every code."""
    wanted_K = torch.tensor(case["inputs"]["wanted"])
    return {"places": balanced.even_capacities(case["params"]["num"], wanted_K).tolist()}


@computes("quantisation", "assign_to_places")
def assign_to_places(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Codes by auction."""
    places_K = torch.tensor(case["inputs"]["places"])
    return {"codes": balanced.assign_to_places(_matrix(case, "costs", dtype), places_K).tolist()}


@computes("quantisation", "residual_kmeans")
def residual_kmeans(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Codebooks, and what they leave."""
    found = residual.residual_kmeans(_matrix(case, "points", dtype), **case["params"])
    return {"codebooks": [_sorted(one) for one in found.codebooks], "inertias": list(found.inertias)}


@computes("quantisation", "residual_codes")
def residual_codes(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Codes by given codebooks."""
    return {"codes": residual.residual_codes(_matrix(case, "points", dtype), _codebooks(case, dtype)).tolist()}


@computes("quantisation", "reconstruct")
def reconstruct(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Sums of code vectors."""
    codes_NL = torch.tensor(case["inputs"]["codes"])
    return {"points": residual.reconstruct(codes_NL, _codebooks(case, dtype)).tolist()}


@computes("quantisation", "sinkhorn_plan")
def sinkhorn_plan(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Shares by transport."""
    return {"shares": sinkhorn.sinkhorn_plan(_matrix(case, "distances", dtype), **case["params"]).tolist()}


@computes("quantisation", "sinkhorn_codes")
def sinkhorn_codes(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The largest shares."""
    return {"codes": sinkhorn.sinkhorn_codes(_matrix(case, "distances", dtype), **case["params"]).tolist()}


@computes("quantisation", "straight_through")
def straight_through(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Values of the codes, gradient of the latents."""
    latents_ND = leaf(_matrix(case, "latents", dtype))
    values_ND = vq_loss.straight_through(latents_ND, _matrix(case, "quantised", dtype))
    return {"values": values_ND.tolist(), "gradient": slope(values_ND, latents_ND).tolist()}


def _quantised(case: Case, dtype: torch.dtype, quantise: Callable[..., vq_loss.QuantisedLatents]) -> dict[str, Any]:
    latents_ND = leaf(_matrix(case, "latents", dtype))
    codebooks = [leaf(codebook) for codebook in _codebooks(case, dtype)]
    found = quantise(latents_ND, codebooks)
    # the codes themselves let the gradient pass as it is
    assert torch.equal(slope(found.quantised_ND, latents_ND), torch.ones_like(latents_ND))
    return {
        "quantised": found.quantised_ND.tolist(),
        "codes": found.codes_NL.tolist(),
        "codebook_loss": found.codebook_loss,
        "commitment_loss": found.commitment_loss,
        "pull": slope(found.commitment_loss, latents_ND).tolist(),
        "push": slope(found.codebook_loss, codebooks[0]).tolist(),
    }


@computes("quantisation", "residual_vq")
def residual_vq(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The gradient passes once."""
    return _quantised(case, dtype, vq_loss.residual_vq)


@computes("quantisation", "residual_vq_per_level")
def residual_vq_per_level(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The gradient passes at every level."""
    return _quantised(case, dtype, vq_loss.residual_vq_per_level)


@computes("ranking", "rank_of")
def rank_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Places, -1 for none."""
    pairs = zip(case["inputs"]["lists"], case["inputs"]["targets"], strict=True)
    ranks = [ranking.rank_of(ranked, target) for ranked, target in pairs]
    return {"ranks": [-1 if rank is None else rank for rank in ranks]}


def _at_k(case: Case, measure: Callable[..., float]) -> list[float]:
    pairs = zip(case["inputs"]["ranks"], case["inputs"]["sharing"], strict=True)
    return [measure(None if rank < 0 else rank, num_sharing=sharing, **case["params"]) for rank, sharing in pairs]


@computes("ranking", "hit_at_k")
def hit_at_k(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """One hit a list."""
    return {"hits": _at_k(case, ranking.hit_at_k)}


@computes("ranking", "ndcg_at_k")
def ndcg_at_k(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """One gain a list."""
    return {"gains": _at_k(case, ranking.ndcg_at_k)}


@computes("ranking", "coverage")
def coverage(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The share of the catalogue."""
    return {"share": ranking.coverage(case["inputs"]["lists"], **case["params"])}


@computes("ranking", "novelty")
def novelty(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Bits of a place."""
    counts = {int(item): count for item, count in case["inputs"]["counts"].items()}
    return {"bits": ranking.novelty(case["inputs"]["lists"], counts, **case["params"])}


@computes("ranking", "resampled_means")
def resampled_means(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The last column less the first, in every draw."""
    means_BM = bootstrap.resampled_means(case["inputs"]["columns"], **case["params"])
    return {"differences": (means_BM[:, -1] - means_BM[:, 0]).tolist()}


@computes("ranking", "bootstrap_intervals")
def bootstrap_intervals(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Means and ends of the intervals."""
    found = bootstrap.bootstrap_intervals(case["inputs"]["columns"], **case["params"])
    return {name: [getattr(one, name) for one in found] for name in ("estimate", "low", "high")}
