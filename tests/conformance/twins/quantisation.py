"""Vectors as a few codes: what is least is found by trying all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.twins.numbers import ONE, TWO, ZERO, Decimal, Row, Rows, dec, gradient, mean, row, total

Inputs = Mapping[str, Any]


def matrix(values: Sequence[Sequence[Any]]) -> Rows:
    """Exact values of rows."""
    return [row(values_of_one) for values_of_one in values]


def square(a: Row, b: Row) -> Decimal:
    """||a - b||^2."""
    return total((x - y) ** 2 for x, y in zip(a, b, strict=True))


def minus(a: Row, b: Row) -> Row:
    """a - b."""
    return [x - y for x, y in zip(a, b, strict=True)]


def plus(a: Row, b: Row) -> Row:
    """a + b."""
    return [x + y for x, y in zip(a, b, strict=True)]


def nearest(point: Row, centres: Rows) -> int:
    """The first of the centres at the least distance."""
    distances = [square(point, centre) for centre in centres]
    return distances.index(min(distances))


def means(points: Rows, codes: Sequence[int], num: int) -> Rows:
    """The mean of the points of each code, 0 of none."""
    width = range(len(points[0]))
    return [
        [mean([p[d] for p, k in zip(points, codes, strict=True) if k == code]) for d in width] for code in range(num)
    ]


def assignments(num_points: int, num_codes: int) -> Iterator[list[int]]:
    """Every way to give points codes."""
    if not num_points:
        yield []
        return
    for others in assignments(num_points - 1, num_codes):
        for code in range(num_codes):
            yield [*others, code]


def spread(points: Rows, codes: Sequence[int], num: int) -> Decimal:
    """sum_n ||x_n - c_{k_n}||^2 with the means as centres."""
    centres = means(points, codes, num)
    return total(square(point, centres[code]) for point, code in zip(points, codes, strict=True))


def least(points: Rows, num: int, sizes: Sequence[int] | None = None) -> list[int]:
    """The codes of the least spread; of codes with these sizes, where they are given."""
    ways = [codes for codes in assignments(len(points), num) if len(set(codes)) == num]
    if sizes is not None:
        ways = [codes for codes in ways if sorted(map(codes.count, range(num))) == sorted(sizes)]
    return min(ways, key=lambda codes: spread(points, codes, num))


def _clusters(points: Rows, codes: list[int], num: int) -> dict[str, Any]:
    return {"centres": sorted(means(points, codes, num)), "inertia": spread(points, codes, num)}


def squared_distances(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Differences, squared and summed."""
    centres = matrix(inputs["centres"])
    return {"distances": [[square(point, centre) for centre in centres] for point in matrix(inputs["points"])]}


def nearest_centres(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The least distance, and whose it is."""
    points, centres = matrix(inputs["points"]), matrix(inputs["centres"])
    codes = [nearest(point, centres) for point in points]
    return {"codes": codes, "distances": [square(p, centres[k]) for p, k in zip(points, codes, strict=True)]}


def cluster_means(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Means and counts."""
    codes, num = inputs["codes"], params["num"]
    return {"means": means(matrix(inputs["points"]), codes, num), "counts": [codes.count(k) for k in range(num)]}


def kmeans(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The best of all partitions."""
    points = matrix(inputs["points"])
    return _clusters(points, least(points, params["num"]), params["num"])


def balanced_kmeans(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The best of all partitions into equal parts."""
    points, num = matrix(inputs["points"]), params["num"]
    sizes = [len(points) // num + (code < len(points) % num) for code in range(num)]
    return _clusters(points, least(points, num, sizes), num)


def kmeans_plus_plus(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The distinct points, which are as many as are chosen."""
    distinct = sorted({tuple(point) for point in matrix(inputs["points"])})
    assert len(distinct) == params["num"]
    return {"chosen": [list(point) for point in distinct]}


def even_capacities(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """N div K, and one more for the N mod K most wanted."""
    wanted, num = inputs["wanted"], params["num"]
    more = sorted(range(len(wanted)), key=lambda code: (-wanted[code], code))[: num % len(wanted)]
    return {"places": [num // len(wanted) + (code in more) for code in range(len(wanted))]}


def assign_to_places(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The cheapest of all assignments that fill the places."""
    costs, places = matrix(inputs["costs"]), inputs["places"]
    ways = [c for c in assignments(len(costs), len(places)) if [c.count(k) for k in range(len(places))] == places]
    return {"codes": min(ways, key=lambda codes: total(costs[n][code] for n, code in enumerate(codes)))}


def residual_kmeans(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The best partition of what each level leaves."""
    left, codebooks, inertias = matrix(inputs["points"]), list[Rows](), list[Decimal]()
    for num in params["sizes"]:
        codes = least(left, num)
        centres = means(left, codes, num)
        left = [minus(point, centres[code]) for point, code in zip(left, codes, strict=True)]
        codebooks.append(sorted(centres))
        inertias.append(total(x * x for point in left for x in point))
    return {"codebooks": codebooks, "inertias": inertias}


def _levels(latent: Row, codebooks: Sequence[Rows]) -> tuple[list[int], Rows, Rows]:
    """Codes, what each level has to code, and its code vectors."""
    codes, lefts, vectors, left = list[int](), list[Row](), list[Row](), latent
    for codebook in codebooks:
        codes.append(nearest(left, codebook))
        lefts.append(left)
        vectors.append(codebook[codes[-1]])
        left = minus(left, vectors[-1])
    return codes, lefts, vectors


def residual_codes(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Level by level, of what is left."""
    codebooks = [matrix(codebook) for codebook in inputs["codebooks"]]
    return {"codes": [_levels(point, codebooks)[0] for point in matrix(inputs["points"])]}


def reconstruct(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Sums of code vectors, of as many levels as there are codes."""
    codebooks, points = [matrix(codebook) for codebook in inputs["codebooks"]], list[Row]()
    for codes in inputs["codes"]:
        point = [ZERO] * len(codebooks[0][0])
        for codebook, code in zip(codebooks[: len(codes)], codes, strict=True):
            point = plus(point, codebook[code])
        points.append(point)
    return {"points": points}


def _plan(inputs: Inputs, params: Inputs) -> Rows:
    """exp(-d' / epsilon), then rows to 1 / N and columns to 1 / K in turn, and all times N."""
    distances, epsilon = matrix(inputs["distances"]), dec(params["epsilon"])
    flat = [d for line in distances for d in line]
    middle, half = (max(flat) + min(flat)) / 2, (max(flat) - min(flat)) / 2
    # the constant is the nearest float to 1e-5, as programs have it
    q = [[(-(d - middle) / (half + dec(1e-5)) / epsilon).exp() for d in line] for line in distances]
    for _ in range(params["num_iterations"]):
        q = [[x / total(line) / len(q) for x in line] for line in q]
        sums = [total(line[k] for line in q) for k in range(len(q[0]))]
        q = [[x / sums[k] / len(sums) for k, x in enumerate(line)] for line in q]
    return [[x * len(q) for x in line] for line in q]


def sinkhorn_plan(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Shares of the points."""
    return {"shares": _plan(inputs, params)}


def sinkhorn_codes(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The first of the largest shares of a row."""
    return {"codes": [line.index(max(line)) for line in _plan(inputs, params)]}


def straight_through(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The quantised values, and 1 for every latent."""
    quantised = matrix(inputs["quantised"])
    return {"values": quantised, "gradient": [[ONE for _ in line] for line in quantised]}


def _losses(inputs: Inputs, *, pulls: int) -> dict[str, Any]:
    """What both quantisers compute; of the first `pulls` levels the commitment has a gradient, 0 = of all."""
    latents, codebooks = matrix(inputs["latents"]), [matrix(codebook) for codebook in inputs["codebooks"]]
    found = [_levels(latent, codebooks) for latent in latents]
    width, levels = len(latents[0]), len(codebooks)
    count = len(latents) * width * levels
    loss = total(square(a, b) for _, lefts, vectors in found for a, b in zip(lefts, vectors, strict=True)) / count

    def commitment(flat: Row) -> Decimal:
        moved = [flat[start : start + width] for start in range(0, len(flat), width)]
        terms = list[Decimal]()
        for latent, now, (_, lefts, vectors) in zip(latents, moved, found, strict=True):
            for level, (left, vector) in enumerate(zip(lefts, vectors, strict=True)):
                # what is left moves with the latent; the codes stay
                shifted = plus(left, minus(now, latent)) if not pulls or level < pulls else left
                terms.append(square(shifted, vector))
        return total(terms) / count

    slopes = gradient(commitment, [x for latent in latents for x in latent])
    push = [[ZERO] * width for _ in codebooks[0]]
    for codes, lefts, vectors in found:
        push[codes[0]] = plus(push[codes[0]], [TWO * x / count for x in minus(vectors[0], lefts[0])])
    return {
        "quantised": [_sum(vectors) for _, _, vectors in found],
        "codes": [codes for codes, _, _ in found],
        "codebook_loss": loss,
        "commitment_loss": loss,
        "pull": [slopes[start : start + width] for start in range(0, len(slopes), width)],
        "push": push,
    }


def _sum(vectors: Rows) -> Row:
    found = vectors[0]
    for vector in vectors[1:]:
        found = plus(found, vector)
    return found


def residual_vq(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Every level pulls the latents."""
    return _losses(inputs, pulls=0)


def residual_vq_per_level(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The first level alone does."""
    return _losses(inputs, pulls=1)


TWINS = {
    "squared_distances": squared_distances,
    "nearest_centres": nearest_centres,
    "cluster_means": cluster_means,
    "kmeans": kmeans,
    "kmeans_plus_plus": kmeans_plus_plus,
    "even_capacities": even_capacities,
    "assign_to_places": assign_to_places,
    "balanced_kmeans": balanced_kmeans,
    "residual_kmeans": residual_kmeans,
    "residual_codes": residual_codes,
    "reconstruct": reconstruct,
    "sinkhorn_plan": sinkhorn_plan,
    "sinkhorn_codes": sinkhorn_codes,
    "straight_through": straight_through,
    "residual_vq": residual_vq,
    "residual_vq_per_level": residual_vq_per_level,
}
