"""Losses of pairs of responses, and of labelled ones."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Source

SOURCES = {
    "bradley_terry": Source("2203.02155", "equation 1; the margin from 2307.09288"),
    "hps": Source("2303.14420", "cross-entropy over the two"),
    "log_exp": Source("2204.05862", "the preference model's loss"),
    "rao_kupper_tie": Source("Rao and Kupper 1967", "the probability of a tie, theta = e^threshold"),
    "step_cross_entropy": Source("2305.20050", "section 2.6; soft labels as in 2312.08935, equation 2"),
    "dpo": Source("2305.18290", "equation 7; smoothing of conservative DPO"),
    "ipo": Source("2310.12036", "equation 17"),
    "ipo_per_token": Source("2310.12036", "equation 17, of log-probs per token"),
    "orpo": Source("2403.07691", "equations 6 and 7"),
    "simpo": Source("2405.14734", "equation 6"),
    "kto_reference_point": Source("2402.01306", "section 4.1"),
    "kto": Source("2402.01306", "equation 8"),
    "hinge": Source("2305.10425", "with the log-ratios of 2309.06657"),
    "robust_dpo": Source("2403.00409", "the loss without bias"),
    "exo": Source("2402.00856", "equation 16"),
    "nca": Source("2402.05369", "pairs"),
    "bco": Source("2404.04656", "with the running mean of rewards as the shift"),
    "sppo": Source("2405.00675", "equation 4.7, hard labels"),
    "aot_paired": Source("2406.05882", "paired"),
    "aot_unpaired": Source("2406.05882", "unpaired"),
    "apo_zero": Source("2408.06266", "equation 7"),
    "apo_down": Source("2408.06266", "equation 8"),
    "discopop": Source("2406.08414", "equation 5"),
}
SCORES = {"chosen": [1.5, -0.25, 0.75, 3.0], "rejected": [0.5, 0.75, 0.75, -4.0]}
FAR = {"chosen": [40.0, -50.0], "rejected": [-30.0, 60.0]}
LOGPROBS = {"chosen": [-12.5, -7.25, -30.0], "rejected": [-14.0, -6.5, -18.75]}
REFERENCE = {"reference_chosen": [-13.0, -7.0, -28.5], "reference_rejected": [-13.25, -7.5, -18.0]}
LENGTHS = {"chosen_lengths": [10, 4, 25], "rejected_lengths": [8, 5, 12]}
LABELLED = {
    "logprobs": [-12.5, -7.25, -14.0, -6.5],
    "reference_logprobs": [-13.0, -7.0, -13.25, -7.5],
    "labels": [1, 1, 0, 0],
}
MISMATCHED = {"mismatched": [-20.0, -11.5, -8.0], "reference_mismatched": [-21.0, -11.75, -8.5]}
BELOW = {"mismatched": [-20.0, -11.5], "reference_mismatched": [-19.0, -11.25]}
APART = {"reference_chosen": [-13.0, -7.0, -28.5], "reference_rejected": [-13.25, -7.5, -18.25]}
"""Log-ratios without two that are equal, whose order would decide the gradient."""
KTO = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def of(name: str, label: str, pins: str, inputs: dict[str, Any], params: Any = None, **more: Any) -> Case:
    """A case of this file."""
    return Case("preference", name, label, pins, SOURCES[name], inputs, params or {}, **more)


CASES = (
    of("bradley_terry", "scores", "both signs, and equal scores", SCORES),
    of("bradley_terry", "margin", "the margin is subtracted", {**SCORES, "margin": [0.5, 0.25, 1.0, 0.0]}),
    of("bradley_terry", "far", "scores far apart neither overflow nor round to 0", FAR),
    of("hps", "scores", "both signs, and equal scores", SCORES),
    of("log_exp", "scores", "both signs, and equal scores", SCORES),
    of("log_exp", "far", "a difference of 110 overflows exp in float32", FAR),
    of("rao_kupper_tie", "scores", "both signs, and equal scores", SCORES, {"threshold": 0.5}),
    of(
        "step_cross_entropy",
        "labels",
        "good and bad steps, and a soft label",
        {"scores": [1.5, -0.25, 0.0, 3.0, 2.0], "labels": [1.0, 0.0, 1.0, 0.0, 0.75]},
    ),
    of("dpo", "plain", "the sigmoid loss", {**LOGPROBS, **REFERENCE}, {"beta": 0.1, "label_smoothing": 0.0}),
    of("dpo", "smoothed", "labels may be wrong", {**LOGPROBS, **REFERENCE}, {"beta": 0.5, "label_smoothing": 0.1}),
    of(
        "ipo",
        "plain",
        "whole responses, as printed",
        {**LOGPROBS, **REFERENCE, **LENGTHS},
        {"beta": 0.25},
        hand={"loss": ["9/16", "169/16", "121/16"]},
        arithmetic="d = 1/2 + 3/4 = 5/4; -1/4 - 1 = -5/4; -3/2 + 3/4 = -3/4; minus 2, squared: 9/16, 169/16, 121/16",
    ),
    of("ipo_per_token", "plain", "divided by lengths first", {**LOGPROBS, **REFERENCE, **LENGTHS}, {"beta": 0.25}),
    of("orpo", "plain", "odds of the geometric mean", {**LOGPROBS, **LENGTHS}, {"coefficient": 0.25}),
    of("simpo", "plain", "gamma is the margin itself", {**LOGPROBS, **LENGTHS}, {"beta": 2.0, "gamma": 1.0}),
    of(
        "kto_reference_point",
        "positive",
        "the mean",
        MISMATCHED,
        hand={"point": "7/12"},
        arithmetic="(1 + 1/4 + 1/2) / 3",
    ),
    of("kto_reference_point", "negative", "never below 0", BELOW, hand={"point": "0"}, arithmetic="(-1 - 1/4) / 2 < 0"),
    of("kto", "plain", "good and bad, equal weights", {**LABELLED, **MISMATCHED}, KTO),
    of(
        "kto",
        "weighted",
        "weights of both, reference point 0",
        {**LABELLED, **BELOW},
        {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    of("hinge", "plain", "inside and beyond the margin", {**LOGPROBS, **REFERENCE}, {"beta": 2.0}),
    of(
        "robust_dpo", "plain", "one label in ten is wrong", {**LOGPROBS, **REFERENCE}, {"beta": 0.5, "label_noise": 0.1}
    ),
    of(
        "exo", "plain", "a label that is nearly sure", {**LOGPROBS, **REFERENCE}, {"beta": 0.5, "label_smoothing": 1e-3}
    ),
    of("nca", "plain", "rewards by themselves", {**LOGPROBS, **REFERENCE}, {"beta": 0.5}),
    of("bco", "no shift", "before there is a mean", {**LOGPROBS, **REFERENCE}, {"beta": 0.5, "shift": 0.0}),
    of("bco", "shift", "rewards are compared with their mean", {**LOGPROBS, **REFERENCE}, {"beta": 0.5, "shift": 0.25}),
    of(
        "sppo",
        "plain",
        "towards 1 / (2 beta) and away from it",
        {**LOGPROBS, **REFERENCE},
        {"beta": 0.5},
        hand={"loss": ["5/16", "89/16", "101/16"]},
        arithmetic="(1/2 - 1)^2 + (-3/4 + 1)^2; (-1/4 - 1)^2 + (1 + 1)^2; (-3/2 - 1)^2 + (-3/4 + 1)^2",
    ),
    of("aot_paired", "plain", "margins, sorted", {**LOGPROBS, **APART}, {"beta": 0.5, "label_smoothing": 0.1}),
    of("aot_unpaired", "plain", "rewards, sorted", {**LOGPROBS, **APART}, {"beta": 0.5, "label_smoothing": 0.1}),
    of("apo_zero", "plain", "chosen up, rejected down", {**LOGPROBS, **REFERENCE}, {"beta": 0.5}),
    of("apo_down", "plain", "both down, rejected further", {**LOGPROBS, **REFERENCE}, {"beta": 0.5}),
    of("discopop", "plain", "a blend of both losses", {**LOGPROBS, **REFERENCE}, {"beta": 0.05, "temperature": 0.05}),
)
