"""Vectors as a few codes: clusters, assignments with capacities, residual quantisers, transport.

Where a start is drawn, the points are such that every start ends alike: what is drawn is no part of a case.
"""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source

SOURCES = {
    "squared_distances": Source("Lloyd 1982", "the distances that a partition compares"),
    "nearest_centres": Source("Lloyd 1982", "the best partition for given centres"),
    "cluster_means": Source("Lloyd 1982", "the best centres for a given partition"),
    "kmeans": Source("Lloyd 1982", "the least sum of squares, where every start ends there"),
    "kmeans_plus_plus": Source("Arthur and Vassilvitskii 2007", "section 2.2, draws with probability 1"),
    "even_capacities": Source("2510.24431", "the sizes of the uniform variant, more for what is more wanted"),
    "assign_to_places": Source("Bertsekas and Castanon 1989", "the cheapest assignment with places"),
    "balanced_kmeans": Source("Bradley, Bennett and Demiriz 2000", "the least sum of squares with equal sizes"),
    "residual_kmeans": Source("Chen, Guan and Wang 2010", "codebooks level by level"),
    "residual_codes": Source("Chen, Guan and Wang 2010", "codes by given codebooks"),
    "reconstruct": Source("Chen, Guan and Wang 2010", "the sum of the code vectors"),
    "sinkhorn_plan": Source("1306.0895", "Sinkhorn's iteration, centred as in 2311.09049"),
    "sinkhorn_codes": Source("2311.09049", "the code of the largest share"),
    "straight_through": Source("1308.3432", "the straight-through estimator"),
    "residual_vq": Source("2203.01941", "section 3.1, codes and commitment"),
    "residual_vq_per_level": Source("2311.09049", "its code: the gradient passes at every level"),
}
POINTS = Draw(91).rows([3] * 6, -1.0, 1.0)
CENTRES = Draw(92).rows([3] * 4, -1.0, 1.0)
DISTANCES = Draw(93).rows([3] * 5, 0.0, 2.0)
LATENTS = Draw(94).rows([2] * 4, -1.0, 1.0)
CODEBOOKS = [Draw(95).rows([2] * 3, -1.0, 1.0), Draw(96).rows([2] * 4, -0.5, 0.5)]
LINE = [[0.0], [1.0], [8.0], [9.0]]


def case(name: str, label: str, pins: str, inputs: Any, params: Any = None, **more: Any) -> Case:
    """A case of this kind."""
    return Case("quantisation", name, label, pins, SOURCES[name], inputs, params or {}, **more)


CASES = (
    case(
        "squared_distances",
        "by_hand",
        "of every point to every centre",
        {"points": [[0.0, 0.0], [3.0, 4.0]], "centres": [[0.0, 0.0], [3.0, 0.0]]},
        hand={"distances": [["0", "9"], ["25", "16"]]},
        arithmetic="3^2; 3^2 + 4^2 and 4^2",
    ),
    case("squared_distances", "drawn", "three dimensions", {"points": POINTS, "centres": CENTRES}),
    case(
        "nearest_centres",
        "equally_near",
        "of equally near centres the first",
        {"points": [[0.0], [9.0], [4.0]], "centres": [[1.0], [7.0], [7.0]]},
        hand={"codes": ["0", "1", "0"], "distances": ["1", "4", "9"]},
        arithmetic="1^2; 2^2 to either; 3^2 to all",
    ),
    case("nearest_centres", "drawn", "three dimensions", {"points": POINTS, "centres": CENTRES}),
    case(
        "cluster_means",
        "with_an_empty_one",
        "a code without points has the mean 0 and the count 0",
        {"points": [[1.0], [3.0], [8.0]], "codes": [0, 0, 2]},
        {"num": 3},
        hand={"means": [["2"], ["0"], ["8"]], "counts": ["2", "0", "1"]},
        arithmetic="(1 + 3) / 2; nothing; 8",
    ),
    case("cluster_means", "drawn", "three dimensions", {"points": POINTS, "codes": [1, 0, 1, 2, 0, 1]}, {"num": 3}),
    case(
        "kmeans",
        "two_pairs",
        "centres are means of their own points, and the sum is over all points",
        {"points": LINE},
        {"num": 2, "key": 1},
        hand={"centres": [["1/2"], ["17/2"]], "inertia": "1"},
        arithmetic="each of four points is 1/2 away from its centre: 4 / 4",
    ),
    case(
        "kmeans",
        "as_many_centres_as_points",
        "nothing is left",
        {"points": [[5.0], [2.0]]},
        {"num": 2, "key": 3},
        hand={"centres": [["2"], ["5"]], "inertia": "0"},
        arithmetic="each point is its own centre",
    ),
    case(
        "kmeans_plus_plus",
        "certain_draws",
        "a point at distance 0 of a chosen one is not drawn while another is farther",
        {"points": [[0.0], [0.0], [5.0]]},
        {"num": 2, "key": 1},
        hand={"chosen": [["0"], ["5"]]},
        arithmetic="if 0 is first, 5 has all of the probability; if 5 is first, both others are 0",
    ),
    case(
        "even_capacities",
        "one_more_for_the_most_wanted",
        "N div K each, and the rest to the most wanted",
        {"wanted": [1, 5, 1]},
        {"num": 7},
        hand={"places": ["2", "3", "2"]},
        arithmetic="7 = 3 x 2 + 1, and the second is wanted most",
    ),
    case(
        "even_capacities",
        "equally_wanted",
        "of equally wanted codes the first gets more",
        {"wanted": [3, 0, 5, 3]},
        {"num": 10},
        hand={"places": ["3", "2", "3", "2"]},
        arithmetic="10 = 4 x 2 + 2: the third, and the first of those wanted by three",
    ),
    case(
        "assign_to_places",
        "by_hand",
        "the sum is least, not the cost of each",
        {"costs": [[0.0, 1.0], [0.0, 3.0], [2.0, 2.0]], "places": [1, 2]},
        hand={"codes": ["1", "0", "1"]},
        arithmetic="the second point keeps the only place of code 0: 1 + 0 + 2, in place of 0 + 3 + 2",
    ),
    case("assign_to_places", "drawn", "five points, three codes", {"costs": DISTANCES, "places": [2, 2, 1]}),
    case(
        "balanced_kmeans",
        "a_far_point",
        "as many points for either code, though one of them is far",
        {"points": [[0.0], [1.0], [2.0], [9.0]]},
        {"num": 2, "key": 1},
        hand={"centres": [["1/2"], ["11/2"]], "inertia": "25"},
        arithmetic="0, 1 and 2, 9: 2 / 4 + 2 x (7/2)^2",
    ),
    case(
        "residual_kmeans",
        "two_levels",
        "the second level has what the first one leaves",
        {"points": LINE},
        {"sizes": [2, 2], "key": 1},
        hand={"codebooks": [[["1/2"], ["17/2"]], [["-1/2"], ["1/2"]]], "inertias": ["1", "0"]},
        arithmetic="centres 1/2 and 17/2 leave -1/2 and 1/2 of each pair, which are their own centres",
    ),
    case(
        "residual_codes",
        "by_hand",
        "the second code is of what the first one leaves",
        {"points": [[9.0], [1.0]], "codebooks": [[[0.5], [8.5]], [[-0.5], [0.5]]]},
        hand={"codes": [["1", "1"], ["0", "1"]]},
        arithmetic="9 - 17/2 = 1/2 and 1 - 1/2 = 1/2",
    ),
    case("residual_codes", "drawn", "two levels of other sizes", {"points": LATENTS, "codebooks": CODEBOOKS}),
    case(
        "reconstruct",
        "by_hand",
        "the sum over the levels",
        {"codes": [[1, 1], [0, 0]], "codebooks": [[[0.5], [8.5]], [[-0.5], [0.5]]]},
        hand={"points": [["9"], ["0"]]},
        arithmetic="17/2 + 1/2; 1/2 - 1/2",
    ),
    case(
        "reconstruct",
        "the_coarse_level_alone",
        "codes of fewer levels than there are codebooks are the coarse ones",
        {"codes": [[2], [0], [1]], "codebooks": CODEBOOKS},
    ),
    case(
        "sinkhorn_plan",
        "equal_points",
        "points at the same distances share both codes evenly",
        {"distances": [[0.0, 1.0], [0.0, 1.0]]},
        {"epsilon": 0.5, "num_iterations": 3},
        hand={"shares": [["1/2", "1/2"], ["1/2", "1/2"]]},
        arithmetic="rows are alike after every step, and each column has half of the points",
    ),
    case(
        "sinkhorn_plan",
        "smooth",
        "columns come last, distances are centred by half of their range",
        {"distances": DISTANCES},
        {"epsilon": 0.5, "num_iterations": 4},
    ),
    case("sinkhorn_plan", "sharp", "small epsilon", {"distances": DISTANCES}, {"epsilon": 0.05, "num_iterations": 50}),
    case(
        "sinkhorn_codes",
        "sharp",
        "evenly used codes in place of the nearest",
        {"distances": [[0.0, 0.1], [0.0, 0.9]]},
        {"epsilon": 0.05, "num_iterations": 50},
        hand={"codes": ["1", "0"]},
        arithmetic="one point a code, and the second loses more by moving",
    ),
    case("sinkhorn_codes", "drawn", "five points", {"distances": DISTANCES}, {"epsilon": 0.05, "num_iterations": 50}),
    case(
        "straight_through",
        "by_hand",
        "the value of the codes with the gradient of the latents",
        {"latents": [[0.25, -1.0]], "quantised": [[1.0, 2.0]]},
        hand={"values": [["1", "2"]], "gradient": [["1", "1"]]},
        arithmetic="z + sg(e - z): the derivative by z is 1",
    ),
    case(
        "residual_vq",
        "by_hand",
        "losses are means over levels, rows and dimensions; every level pulls the latents",
        {"latents": [[9.0]], "codebooks": [[[0.0], [8.0]], [[0.0], [2.0]]]},
        hand={
            "quantised": [["8"]],
            "codes": [["1", "0"]],
            "codebook_loss": "1",
            "commitment_loss": "1",
            "pull": [["2"]],
            "push": [["0"], ["-1"]],
        },
        arithmetic="1 is left of 9 - 8, as near to 0 as to 2: (1 + 1) / 2; 2 x 1 / 2 a level; 2 x (8 - 9) / 2",
    ),
    case("residual_vq", "drawn", "two levels of other sizes", {"latents": LATENTS, "codebooks": CODEBOOKS}),
    case(
        "residual_vq_per_level",
        "by_hand",
        "of all commitments the first one alone pulls the latents",
        {"latents": [[9.0]], "codebooks": [[[0.0], [8.0]], [[0.0], [2.0]]]},
        hand={
            "quantised": [["8"]],
            "codes": [["1", "0"]],
            "codebook_loss": "1",
            "commitment_loss": "1",
            "pull": [["1"]],
            "push": [["0"], ["-1"]],
        },
        arithmetic="as the other one; what is left has no derivative: 2 x 1 / 2 of level 1",
    ),
    case("residual_vq_per_level", "drawn", "two levels of other sizes", {"latents": LATENTS, "codebooks": CODEBOOKS}),
)
