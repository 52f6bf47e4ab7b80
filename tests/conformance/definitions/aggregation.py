"""Aggregations: the loss of a step from losses of tokens, and that no cut of the step changes it."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source, hidden, ones

SOURCES = {
    "token_mean": Source("2503.14476", "equation 8"),
    "sequence_mean_token_mean": Source("2402.03300", "equation 3"),
    "sequence_mean_token_sum": Source("2503.20783", "the policy gradient as it stands"),
    "fixed_length": Source("2503.20783", "Dr. GRPO, a constant length"),
    "token_sum": Source("Williams 1992", "the sum over all tokens"),
    "prompt_mean_token_mean": Source("2510.13786", "prompt-level loss aggregation"),
}
LENGTHS = [2, 5, 3, 4]
VALUES = Draw(21).rows(LENGTHS, -1.0, 2.0)
HOLES = [[1, 1], [1, 0, 0, 1, 1], [0, 1, 0], [1, 1, 1, 0]]
EMPTY = [[1, 1], [0, 0, 0, 0, 0], [1, 1, 0], [1, 1, 1, 1]]
CUTS = {"cut_2_2": [[0, 1], [2, 3]], "cut_1_3": [[2], [0, 1, 3]], "cut_1_1_1_1": [[3], [1], [0], [2]]}
"""Micro-batches of a step, by sequences."""


def params(name: str, **more: Any) -> dict[str, Any]:
    """The constant length and the prompts of the sequences, for those that have them."""
    of_name = {"fixed_length": {"max_tokens": 8}, "prompt_mean_token_mean": {"prompts": [0, 1, 0, 1]}}
    return of_name.get(name, {}) | more


def cases_of(name: str) -> list[Case]:
    """Holes, NaN, an empty sequence, a wider batch, and cuts."""

    def of(label: str, pins: str, mask: Any, values: Any = VALUES, **more: Any) -> Case:
        return Case(
            "aggregation", name, label, pins, SOURCES[name], {"values": values, "mask": mask}, params(name, **more)
        )

    wider = [[*row, *[0.0] * (9 - len(row))] for row in VALUES]
    return [
        of("whole", "every token counts", ones(LENGTHS)),
        of("masked", "tokens of observations count nowhere", HOLES),
        of("masked_nan", "NaN where masked reaches nothing", HOLES, hidden(VALUES, HOLES)),
        of("empty_row", "a sequence without tokens is not counted", EMPTY),
        of(
            "wider",
            "nine places of padding instead of five change nothing",
            [[*marks, *[0] * (9 - len(marks))] for marks in HOLES],
            wider,
        ),
        *(of(label, "the parts of a step, cut anyhow, add up to it", HOLES, cuts=cuts) for label, cuts in CUTS.items()),
    ]


CASES = tuple(case for name in SOURCES for case in cases_of(name))
