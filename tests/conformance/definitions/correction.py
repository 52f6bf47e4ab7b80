"""Corrections for the distance between the policy that sampled and the one that the trainer computes."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source, added, hidden, ones

YAO = "Yao et al. 2025 (fengyao.notion.site/off-policy-rl)"
LIU = "Liu et al. 2025 (When speed kills stability)"
SOURCES = {
    "truncate_tokens": Source(YAO, "truncated importance sampling of tokens"),
    "truncate_sequences": Source(YAO, "truncated importance sampling of sequences"),
    "mask_tokens": Source("2510.18855", "IcePop"),
    "mask_sequences": Source(LIU, "masked importance sampling of sequences"),
    "mask_sequences_geometric": Source(LIU, "geometric mean of a sequence"),
    "masked_geometric_with_ratios": Source(LIU, "the mask, times rho"),
    "veto_outliers": Source(LIU, "veto of outlying tokens"),
    "off_policy_sequence_mask": Source("2512.02556", "section 3.1, off-policy sequence masking"),
}
LENGTHS = [4, 2, 6, 3]
BEHAVIOUR = Draw(41).rows(LENGTHS, -5.0, -2.0)
MOVES = [[0.1, -0.2, 0.3, 0.05], [1.0, 0.9], [-0.05, 0.02, -0.9, 0.3, 1.7, 0.01], [-0.4, -0.5, -0.3]]
"""log rho: products of 1.28, 6.69, 2.94 and 0.30."""
HOLES = [[1, 1, 0, 1], [1, 1], [1, 0, 1, 1, 1, 1], [0, 1, 1]]
LONG_MOVES = [[0.0003] * 64, [-0.0002] * 64, [0.02] * 64]
CAP, BAND = {"cap": 2.0}, {"low": 0.7, "high": 3.0}


def inputs(mask: Any = None, nan: bool = False, moves: Any = None, **more: Any) -> dict[str, Any]:
    """The trainer's log-probs `moves` above those of the engine."""
    behaviour = BEHAVIOUR if moves is None else [[-1.0] * len(row) for row in moves]
    given = {"behaviour_logprobs": behaviour, "old_logprobs": added(behaviour, moves or MOVES), **more}
    mask = mask or ones([len(row) for row in behaviour])
    return {"mask": mask} | {key: hidden(rows, mask) if nan else rows for key, rows in given.items()}


def cases_of(name: str, params: dict[str, Any], **more: Any) -> list[Case]:
    """Plain, with observations, and with NaN at them."""

    def of(label: str, pins: str, given: dict[str, Any]) -> Case:
        return Case("correction", name, label, pins, SOURCES[name], given, params)

    return [
        of("moved", "within and beyond the bounds", inputs(**more)),
        of("masked", "tokens of observations have no part in sums and means", inputs(HOLES, **more)),
        of("masked_nan", "NaN where masked reaches nothing", inputs(HOLES, nan=True, **more)),
    ]


def collision(name: str, pins: str) -> Case:
    """Sequences of 64 tokens that differ by little a token: what a name means decides who is kept."""
    params = {"low": 0.99, "high": 1.02}
    return Case("correction", name, "long", pins, SOURCES[name], inputs(moves=LONG_MOVES), params)


SIGNS = [[-1.0] * 4, [-0.5] * 2, [1.0] * 6, [-2.0] * 3]
CASES = (
    *cases_of("truncate_tokens", CAP),
    *cases_of("truncate_sequences", CAP),
    *cases_of("mask_tokens", BAND),
    *cases_of("mask_sequences", BAND),
    collision("mask_sequences", "the product: the first sequence is kept at 1.019, the last is dropped at 3.6"),
    *cases_of("mask_sequences_geometric", BAND),
    collision("mask_sequences_geometric", "the geometric mean: the last is dropped at 1.0202"),
    *cases_of("masked_geometric_with_ratios", BAND),
    *cases_of("veto_outliers", {"low": 0.45, "high": 3.0}),
    *cases_of("off_policy_sequence_mask", {"delta": 0.1}, advantages=SIGNS),
    Case(
        "correction",
        "off_policy_sequence_mask",
        "good",
        "a sequence of small positive advantage is kept however far it is",
        SOURCES["off_policy_sequence_mask"],
        inputs(advantages=[[-1.0] * 4, [-0.5] * 2, [0.25] * 6, [0.5] * 3]),
        {"delta": 0.1},
    ),
)
