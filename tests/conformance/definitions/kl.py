"""Estimators of the divergence from a reference policy, as values and by their gradients."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source

BLOG = "Schulman 2020, Approximating KL divergence"
SOURCES = {
    "k1": Source(BLOG, "k1"),
    "k2": Source(BLOG, "k2"),
    "k3": Source(BLOG, "k3; 2402.03300, equation 4"),
    "absolute": Source(BLOG, "a distance, not a divergence"),
    "straight_through": Source(BLOG, "the value of k3 with the gradient of k2"),
    "unbiased_k3": Source("2512.02556", "section 3.1"),
    "importance_weighted_k1": Source("2506.09477", "the estimator of the old policy's tokens"),
}
REFERENCE = Draw(31).numbers(10, -6.0, -3.0)
MOVES = [0.0, 0.5, -0.5, 1.5, -1.5, 0.125, -0.0625, 2.5, -2.25, 0.25]
NEAR = [0.00390625, -0.0009765625, 0.0001220703125, -0.00006103515625]


def inputs(moves: list[float], references: list[float]) -> dict[str, Any]:
    """Log-probs that lie `moves` above their references."""
    now = [round(r + m, 6) for r, m in zip(references, moves, strict=True)]
    return {"logprobs": now, "reference_logprobs": references}


def cases_of(name: str) -> list[Case]:
    """Ordinary distances, tiny ones, and those where trainers clamp."""

    def of(label: str, pins: str, given: dict[str, Any], **more: Any) -> Case:
        if name in ("unbiased_k3", "importance_weighted_k1"):
            shifts = Draw(32).numbers(len(given["logprobs"]), -0.5, 0.5)
            given = given | {"old_logprobs": [round(v - s, 6) for v, s in zip(given["logprobs"], shifts, strict=True)]}
        return Case("kl", name, label, pins, SOURCES[name], given, {}, **more)

    tiny = {"logprobs": [m - 1.0 for m in NEAR], "reference_logprobs": [-1.0] * 4}
    unlikely = {"logprobs": [-3.5, -13.0, -12.5, -19.0], "reference_logprobs": [-0.5, -1.0, -2.25, -1.0]}
    beyond = {"logprobs": [-24.0, -26.5], "reference_logprobs": [-0.5, -1.0]}
    return [
        of("ordinary", "both signs", inputs(MOVES, REFERENCE)),
        of("tiny", "digits near 0, where nearly all tokens are", tiny, float32=False),
        of("unlikely", "tokens that became e^3 to e^18 times less likely: a cap on the estimate stops them", unlikely),
        of("beyond", "beyond a log-ratio of -20, where the estimate is held and nothing may overflow", beyond),
    ]


CASES = (
    *(case for name in SOURCES for case in cases_of(name)),
    Case(
        "kl",
        "importance_weighted_k1",
        "by_hand",
        "the ratio has a gradient too: r (x + 1)",
        SOURCES["importance_weighted_k1"],
        {"logprobs": [-1.0, -2.0], "reference_logprobs": [-1.5, -1.75], "old_logprobs": [-1.0, -2.0]},
        hand={"value": ["1/2", "-1/4"], "gradient": ["3/2", "3/4"]},
        arithmetic="at the old policy r is 1: x = 1/2 and -1/4; x + 1",
    ),
)
