"""Changes to rewards before advantages."""

from __future__ import annotations

from typing import Any

from conformance.definitions.case import Case, Draw, Source

SOURCES = {
    "soft_overlong_penalty": Source("2503.14476", "equation 13"),
    "stop_properly": Source("ProRL v2", "stop-properly penalty"),
    "truncated_keep": Source("2503.14476", "overlong filtering, section 3.4"),
    "cosine_length_reward": Source("2502.03373", "cosine reward"),
    "kimi_length_reward": Source("2501.12599", "length penalty"),
    "kl_penalised": Source("1909.08593", "equation 2"),
    "token_rewards": Source("2501.03262", "rewards of tokens; 1909.08593, equation 2"),
    "combine": Source("2402.03300", "a weighted sum"),
    "combine_normalised": Source("2601.05242", "decoupled normalisation as a reward"),
    "clip_rewards": Source("1909.08593", "rewards kept in a range"),
    "running_scale": Source("Chan, Golub, LeVeque 1979", "moments of batches, merged"),
    "adaptive_kl": Source("1909.08593", "section 2.2, the controller of beta"),
}
COSINE = {
    "max_length": 10,
    "correct_short": 2.0,
    "correct_long": 1.0,
    "wrong_short": -10.0,
    "wrong_long": 0.0,
    "exceeded": -10.0,
}
KL = Draw(61).rows([3, 5, 2], -0.2, 0.6)
MASK = [[1, 1, 1], [1, 0, 0, 1, 1], [1, 0]]
SPENT = {"rewards": [1.0, -0.5, 0.25], "kl": KL, "mask": MASK}
SPENT_NAN = {
    **SPENT,
    "kl": [[v if m else None for v, m in zip(r, k, strict=True)] for r, k in zip(KL, MASK, strict=True)],
}
PARTS = {
    "components": [[1.0, 0.5], [0.0, 0.25], [1.0, 1.0], [0.0, 0.0], [1.0, 0.75]],
    "weights": [1.0, 0.5],
    "groups": [0, 0, 0, 1, 1],
}


def of(name: str, label: str, pins: str, inputs: dict[str, Any], params: Any = None, **more: Any) -> Case:
    """A case of this file."""
    return Case("shaping", name, label, pins, SOURCES[name], inputs, params or {}, **more)


CASES = (
    of(
        "soft_overlong_penalty",
        "within",
        "linear over the buffer",
        {"lengths": [3, 6, 7, 9, 10]},
        {"max_length": 10, "buffer": 4, "factor": 1.0},
        hand={"rewards": ["0", "0", "-1/4", "-3/4", "-1"]},
        arithmetic="(L - 6) / 4, from 0 to 1",
    ),
    of(
        "soft_overlong_penalty",
        "beyond",
        "it stays at the full penalty beyond the limit",
        {"lengths": [11, 14, 25]},
        {"max_length": 10, "buffer": 4, "factor": 1.0},
        hand={"rewards": ["-1", "-1", "-1"]},
        arithmetic="held at -1",
    ),
    of(
        "soft_overlong_penalty",
        "half",
        "the factor scales the penalty",
        {"lengths": [5, 8, 12]},
        {"max_length": 10, "buffer": 4, "factor": 0.5},
        hand={"rewards": ["0", "-1/4", "-1/2"]},
        arithmetic="half of (L - 6) / 4, from 0 to 1/2",
    ),
    of(
        "stop_properly",
        "half",
        "truncated ones alone",
        {"rewards": [1.0, 0.5, 1.0], "truncated": [0, 1, 1]},
        {"coefficient": 0.5},
        hand={"rewards": ["1", "1/4", "1/2"]},
        arithmetic="times 1/2 where truncated",
    ),
    of(
        "truncated_keep",
        "two_of_three",
        "tokens of a truncated sequence do not train",
        {"finished": [1, 0, 1], "mask": [[1, 1, 0], [1, 1], [0, 1]]},
        hand={"mask": [["1", "1", "0"], ["0", "0"], ["0", "1"]]},
        arithmetic="mask and finished",
    ),
    of(
        "cosine_length_reward",
        "lengths",
        "short when right, long when wrong, and the limit",
        {"correct": [1, 1, 1, 0, 0, 0, 1, 0], "lengths": [0, 5, 8, 0, 5, 9, 10, 12]},
        COSINE,
    ),
    of(
        "cosine_length_reward",
        "other_ends",
        "all four ends",
        {"correct": [1, 1, 0, 0, 1], "lengths": [1, 6, 2, 7, 9]},
        {
            **COSINE,
            "max_length": 8,
            "correct_short": 1.5,
            "correct_long": 0.5,
            "wrong_short": -2.0,
            "wrong_long": -0.75,
            "exceeded": -3.0,
        },
    ),
    of(
        "kimi_length_reward",
        "groups",
        "wrong answers gain nothing; equal lengths give 0",
        {
            "correct": [1, 1, 1, 0, 0, 0, 1, 0],
            "lengths": [10, 20, 30, 10, 30, 25, 7, 7],
            "groups": [0, 0, 0, 0, 0, 0, 1, 1],
        },
        hand={"rewards": ["1/2", "0", "-1/2", "0", "-1/2", "-1/4", "0", "0"]},
        arithmetic="1/2 - (L - 10) / 20; the wrong at most 0; the second group has one length",
    ),
    of("kl_penalised", "observations", "the sum over sampled tokens", SPENT, {"coefficient": 0.1}),
    of("kl_penalised", "nan", "NaN where masked reaches nothing", SPENT_NAN, {"coefficient": 0.1}),
    of("token_rewards", "observations", "the reward at the last sampled token", SPENT, {"coefficient": 0.1}),
    of("token_rewards", "nan", "NaN where masked reaches nothing", SPENT_NAN, {"coefficient": 0.1}),
    of("combine", "two", "a weighted sum", PARTS),
    of("combine_normalised", "two", "each part normalised within its group first", PARTS, {"epsilon": 1e-6}),
    of(
        "clip_rewards",
        "both_sides",
        "both bounds",
        {"rewards": [-3.0, -1.0, 0.5, 2.0]},
        {"limit": 1.5},
        hand={"rewards": ["-3/2", "-1", "1/2", "3/2"]},
        arithmetic="held at 3/2",
    ),
    of(
        "running_scale",
        "three_batches",
        "one scale for a run: batches are merged; equal rewards so far are left as they are",
        {"batches": [[0.5, 0.5], [1.0, -1.0, 0.25], [2.0, 0.0]]},
        {"minus_mean": 0, "epsilon": 1e-8},
    ),
    of(
        "running_scale",
        "minus_mean",
        "the mean of the run is subtracted",
        {"batches": [[0.5, 0.75], [1.0, -1.0, 0.25], [2.0, 0.0]]},
        {"minus_mean": 1, "epsilon": 1e-8},
    ),
    of(
        "adaptive_kl",
        "three_updates",
        "the error is held at a fifth on both sides",
        {"kl": [12.0, 6.6, 0.5], "num_samples": [1000, 512, 2000]},
        {"coefficient": 0.1, "target": 6.0, "horizon": 10000.0},
    ),
)
