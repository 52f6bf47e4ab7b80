"""Advantages of sequences from the rewards of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.definitions.case import Case, Draw, Source

SOURCES = {
    "group_norm": Source("2402.03300", "section 4.1.2"),
    "group_centred": Source("2503.20783", "section 3.2"),
    "batch_std": Source("2508.08221", "Lite PPO"),
    "leave_one_out": Source("2402.14740", "RLOO"),
    "max_rl": Source("2602.02710", "the estimator"),
    "opo": Source("2505.23585", "the optimal reward baseline"),
    "gpg": Source("2504.02546", "accurate gradient estimation, F_norm = 1"),
    "cpgd": Source("2505.12504", "weighted advantage"),
    "gdpo": Source("2601.05242", "decoupled normalisation and weighted sum"),
    "gdpo_batch": Source("2601.05242", "batch-wise normalisation"),
    "remax": Source("2310.10505", "the estimator"),
    "pass_at_k": Source("2508.10751", "analytical derivation"),
    "best_of_group": Source("2503.19595", "leave-one-out for the maximum"),
}
EPS = {"epsilon": 1e-6}
CORRECT = {"rewards": [1.0, 0.0, 0.0, 0.0], "groups": [0, 0, 0, 0]}
PAIR = {"rewards": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], "groups": [0, 0, 0, 0, 1, 1, 1, 1]}
GRADED = {"rewards": Draw(1).numbers(12, -1, 2), "groups": [0] * 4 + [1] * 4 + [2] * 4}
RAGGED = {
    "rewards": [0.5, 1.0, -0.25, 0.0, 2.0, 0.75, 1.5, -1.0, 0.25],
    "groups": [7, -2, 7, 7, -2, 7, 7, 4, 4],
}
ALONE = {"rewards": [0.75, -0.25], "groups": [0, 1]}
SINGLE = {"rewards": [0.75, 1.0, 0.25], "groups": [0, 1, 1]}
LENGTHS = [3, 7, 1, 4, 2, 9, 5, 6, 8]
CONSTANT = {value: {"rewards": [value] * 8, "groups": [0] * 8} for value in (0.1, 0.3, 0.7)}
BESIDE = {"rewards": [0.1] * 3 + [1.0, 0.0, 0.5], "groups": [0] * 3 + [1] * 3}


def of(name: str, label: str, pins: str, inputs: Mapping[str, Any], params: Any = None, **more: Any) -> Case:
    """A case of this file."""
    return Case("advantage", name, label, pins, SOURCES[name], inputs, params or {}, **more)


def zeros(name: str, params: Any = None) -> list[Case]:
    """Equal rewards teach nothing: exactly 0, whatever rounding the mean of eight equal numbers suffers."""
    return [
        of(
            name,
            f"identical_{value}",
            "equal rewards give exactly 0, also where their mean is not the reward to the last digit",
            inputs,
            params,
            hand={"advantages": ["0"] * 8},
            arithmetic="every reward is the mean",
        )
        for value, inputs in CONSTANT.items()
    ]


def shapes(name: str, params: Any = None, **extra: Any) -> list[Case]:
    """Groups of unequal size in any order, and a group of one."""

    def with_extra(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, **{key: values[: len(inputs["rewards"])] for key, values in extra.items()}}

    return [
        of(name, "ragged", "groups differ in size, ids are any numbers, order is any", with_extra(RAGGED), params),
        of(name, "singleton", "a group of one has nobody to compare with: 0", with_extra(SINGLE), params),
        of(name, "singletons", "one response a prompt: nothing to compare", with_extra(ALONE), params),
    ]


CASES = (
    of(
        "group_norm",
        "one_right",
        "the standard deviation divides by G - 1; no epsilon as printed",
        CORRECT,
        {"epsilon": 0.0},
        hand={"advantages": ["3/2", "-1/2", "-1/2", "-1/2"]},
        arithmetic="mean 1/4; squares 9/16 + 3/16 = 3/4; 3/4 over G - 1 = 3 is 1/4; std 1/2; (3/4, -1/4) over 1/2",
    ),
    of(
        "group_norm",
        "epsilon_beside_std",
        "epsilon is added to the standard deviation, not to the variance",
        CORRECT,
        {"epsilon": 0.25},
        hand={"advantages": ["1", "-1/3", "-1/3", "-1/3"]},
        arithmetic="std 1/2 as before; (3/4, -1/4) over 1/2 + 1/4",
    ),
    of("group_norm", "graded", "rewards that are not 0 and 1", GRADED, EPS),
    of(
        "group_norm",
        "nearly_equal",
        "a spread of 1e-3: which epsilon is added is seen",
        {"rewards": [0.5, 0.501, 0.5, 0.499], "groups": [0] * 4},
        EPS,
        float32=False,
    ),
    of(
        "group_norm",
        "far_from_zero",
        "digits survive an offset",
        {"rewards": [4096.25, 4096.0, 4095.5, 4096.5], "groups": [0] * 4},
        EPS,
    ),
    *zeros("group_norm", EPS),
    *shapes("group_norm", EPS),
    of("group_norm", "identical_beside", "a group without signal beside one with it", BESIDE, EPS),
    of(
        "group_centred",
        "one_right",
        "no division",
        CORRECT,
        hand={"advantages": ["3/4", "-1/4", "-1/4", "-1/4"]},
        arithmetic="mean 1/4",
    ),
    of("group_centred", "graded", "rewards that are not 0 and 1", GRADED),
    *zeros("group_centred"),
    *shapes("group_centred"),
    of(
        "batch_std",
        "two_groups",
        "the spread is that of all rewards, not of the centred ones",
        {"rewards": [1.0, 0.0, 3.0, 2.0], "groups": [0, 0, 1, 1]},
        {"epsilon": 0.0},
        float32=True,
    ),
    of("batch_std", "graded", "rewards that are not 0 and 1", GRADED, EPS),
    of("batch_std", "identical_beside", "a group without signal is 0 beside one with it", BESIDE, EPS),
    *shapes("batch_std", EPS),
    of(
        "leave_one_out",
        "one_right",
        "the baseline leaves the sequence itself out",
        CORRECT,
        hand={"advantages": ["1", "-1/3", "-1/3", "-1/3"]},
        arithmetic="1 - 0/3; 0 - 1/3",
    ),
    of("leave_one_out", "graded", "rewards that are not 0 and 1", GRADED),
    *zeros("leave_one_out"),
    *shapes("leave_one_out"),
    of(
        "max_rl",
        "one_right",
        "divided by the mean",
        CORRECT,
        hand={"advantages": ["3", "-1", "-1", "-1"]},
        arithmetic="(3/4, -1/4) over 1/4",
    ),
    of(
        "max_rl",
        "none_right",
        "0 where nothing is right, not 0/0",
        {"rewards": [0.0] * 4 + [1.0, 0.0], "groups": [0] * 4 + [1] * 2},
        hand={"advantages": ["0"] * 4 + ["1", "-1"]},
        arithmetic="mean 0: 0; mean 1/2: (1/2, -1/2) over 1/2",
    ),
    *zeros("max_rl"),
    of(
        "opo",
        "two",
        "the baseline is weighted by length",
        {"rewards": [1.0, 0.0], "groups": [0, 0], "lengths": [3, 1]},
        hand={"advantages": ["1/4", "-3/4"]},
        arithmetic="baseline (3 * 1 + 1 * 0) / 4 = 3/4",
    ),
    of("opo", "graded", "rewards that are not 0 and 1", {**GRADED, "lengths": [5, 2, 9, 1, 3, 3, 4, 8, 6, 2, 7, 1]}),
    of(
        "opo",
        "identical_0.1",
        "equal rewards give exactly 0",
        {**CONSTANT[0.1], "lengths": [3, 1, 4, 1, 5, 9, 2, 6]},
        hand={"advantages": ["0"] * 8},
        arithmetic="every reward is the baseline",
    ),
    *shapes("opo", None, lengths=LENGTHS),
    of(
        "gpg",
        "one_group_without_signal",
        "alpha counts sequences in groups of equal rewards, not sequences of reward 0",
        {"rewards": [1.0, 0.0, 1.0, 1.0], "groups": [0, 0, 1, 1]},
        hand={"advantages": ["1", "-1", "0", "0"]},
        arithmetic="B = 4, M = 2 in the second group; alpha = 4 / 2; 2 * (1/2, -1/2)",
    ),
    of("gpg", "graded", "all groups have signal: alpha 1", GRADED),
    *zeros("gpg"),
    *shapes("gpg"),
    of(
        "cpgd",
        "clip_filter",
        "the weight counts groups",
        {"rewards": [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0], "groups": [0, 0, 1, 1, 1, 2, 2]},
        {"weighting": "clip_filter"},
        hand={"advantages": ["3/2", "-3/2", "0", "0", "0", "0", "0"]},
        arithmetic="3 groups over 1 with signal is 3, which is the limit; 3 * (1/2, -1/2)",
    ),
    of(
        "cpgd",
        "clip_filter_limited",
        "the weight is at most 3",
        {"rewards": [1.0, 0.0, *[1.0] * 8], "groups": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]},
        {"weighting": "clip_filter"},
        hand={"advantages": ["3/2", "-3/2", *["0"] * 8]},
        arithmetic="5 groups over 1 with signal is 5, held at 3; 3 * (1/2, -1/2)",
    ),
    of("cpgd", "equal", "no weight", GRADED, {"weighting": "equal"}),
    of("cpgd", "std", "the weight is one over the deviation", GRADED, {"weighting": "std", **EPS}),
    of("cpgd", "ragged", "groups of unequal size", RAGGED, {"weighting": "clip_filter"}),
    of(
        "gdpo",
        "two_components",
        "each component is normalised before they are added",
        {
            "components": [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]],
            "weights": [1.0, 1.0],
            "groups": [0] * 4,
        },
        {"epsilon": 0.0},
        hand={"advantages": ["1", "1", "-1", "-1"]},
        arithmetic="first: 3/2, -1/2, -1/2, -1/2; second, of std 1: -1/2, 3/2, -1/2, -1/2; added",
    ),
    of(
        "gdpo",
        "weighted",
        "weights act after the normalisation; an equal component adds 0",
        {
            "components": [[0.9, 0.1, 3.0], [0.2, 0.1, -1.0], [0.4, 0.1, 0.5], [0.1, 0.7, 2.0], [0.3, 0.2, 2.5]],
            "weights": [1.0, 0.5, 0.25],
            "groups": [0, 0, 0, 1, 1],
        },
        EPS,
    ),
    of(
        "gdpo_batch",
        "one_batch",
        "the sum is normalised over the sequences of the batch",
        {
            "components": [[1.0, 0.5], [0.0, 2.0], [0.0, 0.0], [1.0, 0.0], [0.25, 1.0], [0.75, 0.5]],
            "weights": [1.0, 0.5],
            "groups": [0, 0, 0, 1, 1, 1],
            "lengths": [2, 3, 1, 2, 4, 1],
        },
        EPS,
    ),
    of(
        "remax",
        "three",
        "the greedy response is the baseline",
        {"rewards": [1.0, 0.25, -0.5], "greedy_rewards": [0.5, 0.5, 1.0]},
        hand={"advantages": ["1/2", "-1/4", "-3/2"]},
        arithmetic="differences",
    ),
    of(
        "pass_at_k",
        "two_of_four",
        "draws without replacement",
        CORRECT,
        {"k": 2},
        hand={"advantages": ["1", "-1/3", "-1/3", "-1/3"]},
        arithmetic="failures 3/6 = 1/2, sigma 1/2; right: 1/2 over 1/2; wrong: (1/2 - C(2,1)/C(3,1)) over 1/2",
    ),
    of("pass_at_k", "one", "k = 1 is GRPO without Bessel's correction", PAIR, {"k": 1}),
    of("pass_at_k", "three", "all draws rewarded: 0 where fewer than k are wrong", PAIR, {"k": 3}),
    of(
        "pass_at_k",
        "too_few",
        "a group smaller than k has no draw",
        {"rewards": [1.0, 0.0, 1.0, 0.0, 0.0], "groups": [0, 0, 1, 1, 1]},
        {"k": 3},
    ),
    of(
        "best_of_group",
        "one_best",
        "the lead over the second best, over the deviation",
        {"rewards": [3.0, 1.0, 1.0, -1.0], "groups": [0] * 4},
        {"epsilon": 0.0},
    ),
    of(
        "best_of_group",
        "two_best",
        "two best ones replace each other",
        {"rewards": [1.0, 1.0, 0.0], "groups": [0] * 3},
        EPS,
        hand={"advantages": ["0"] * 3},
        arithmetic="lead 0",
    ),
    *shapes("best_of_group", EPS),
)
