"""Advantages of tokens: returns, GAE, whitening, steps and turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.definitions.case import Case, Draw, Source, hidden, ones

SOURCES = {
    "discounted_returns": Source("2501.03262", "returns of tokens"),
    "gae": Source("1506.02438", "equation 16"),
    "decoupled_gae": Source("2504.05118", "decoupled and length-adaptive GAE (2503.01491)"),
    "bootstrap_truncated": Source("1712.00378", "partial-episode bootstrapping"),
    "optimal_token_baseline": Source("2602.07078", "the baseline of least variance at each token"),
    "whiten": Source("2501.03262", "normalisation over the batch"),
    "reinforce_pp": Source("2501.03262", "REINFORCE++"),
    "reinforce_pp_baseline": Source("2501.03262", "REINFORCE++-baseline"),
    "process_group_norm": Source("2402.03300", "section 4.1.3"),
    "turn_level": Source("2505.11821", "MT-GRPO, with the step returns of 2505.10978"),
}
LENGTHS = [4, 1, 6]
ENDS = [[0.0, 0.0, 0.0, 1.0], [0.5], [0.0, 0.0, 0.0, 0.0, 0.0, -1.0]]
DENSE = Draw(2).rows(LENGTHS, -0.5, 0.5)
VALUES = Draw(3).rows(LENGTHS, -1.0, 1.0)
TURNS = [[1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1, 0]]
"""Sampled tokens and observations: turns of an agent, an observation of one token, and padding on both sides."""
TURN_REWARDS = [[0.0, -0.1, 0.0, 0.0, 0.0, -0.2, 1.0], [0.5, 0.0, 0.0, -1.0], [0.0, 0.0, 0.25, 0.5, 0.0]]
TURN_NUMBERS = [[0, 0, -1, -1, 1, 1, 1], [0, -1, 1, 1], [-1, 0, 0, 0, -1]]
OF_TOKENS = ("token_rewards", "logprobs", "sum_squared_probs")
BASELINE: dict[str, Any] = {
    "token_rewards": TURN_REWARDS,
    "mask": TURNS,
    "logprobs": Draw(5).rows([7, 4, 5], -2.0, -0.1),
    "sum_squared_probs": Draw(6).rows([7, 4, 5], 0.75, 1.0),
    "groups": [1, 1, 1],
}
TURN_VALUES = Draw(4).rows([7, 4, 5], -0.5, 0.9)


def of(name: str, label: str, pins: str, inputs: Mapping[str, Any], params: Any = None, **more: Any) -> Case:
    """A case of this file."""
    return Case("advantage", name, label, pins, SOURCES[name], inputs, params or {}, **more)


def rewarded(rewards: Any, mask: Any, values: Any = None, nan: bool = False) -> dict[str, Any]:
    """Inputs of a recurrence."""
    found = {"token_rewards": rewards, "mask": mask} | ({} if values is None else {"values": values})
    return {key: hidden(rows, mask) if nan and key != "mask" else rows for key, rows in found.items()}


def gamma(value: float, lambd: float | None = None) -> dict[str, float]:
    """Parameters of a recurrence."""
    return {"gamma": value} | ({} if lambd is None else {"lambda": lambd})


CASES = (
    of(
        "discounted_returns",
        "around_an_observation",
        "an observation neither discounts nor ends the sum",
        rewarded([[1.0, 0.0, 2.0]], [[1, 0, 1]]),
        gamma(0.5),
        hand={"returns": [["2", "0", "2"]]},
        arithmetic="1 + 1/2 * 2; masked; 2",
    ),
    of(
        "discounted_returns",
        "outcome",
        "the last token's reward reaches all",
        rewarded(ENDS, ones(LENGTHS)),
        gamma(1.0),
    ),
    of("discounted_returns", "dense", "a reward at every token", rewarded(DENSE, ones(LENGTHS)), gamma(0.9)),
    of("discounted_returns", "turns", "several turns", rewarded(TURN_REWARDS, TURNS), gamma(0.9)),
    of(
        "discounted_returns",
        "turns_nan",
        "NaN where masked reaches nothing",
        rewarded(TURN_REWARDS, TURNS, nan=True),
        gamma(0.9),
    ),
    of(
        "gae",
        "two_tokens",
        "delta, then the recurrence",
        rewarded([[0.0, 1.0]], [[1, 1]], [[0.5, 0.25]]),
        gamma(0.5, 0.5),
        hand={"advantages": [["-3/16", "3/4"]], "returns": [["5/16", "1"]]},
        arithmetic="delta_2 = 1 - 1/4 = 3/4; delta_1 = 1/8 - 1/2 = -3/8; A_1 = -3/8 + 1/4 * 3/4 = -3/16; G = A + V",
    ),
    of("gae", "dense", "a reward at every token", rewarded(DENSE, ones(LENGTHS), VALUES), gamma(0.9, 0.95)),
    of("gae", "lambda_1", "the return minus the value", rewarded(DENSE, ones(LENGTHS), VALUES), gamma(1.0, 1.0)),
    of("gae", "lambda_0", "one temporal difference", rewarded(DENSE, ones(LENGTHS), VALUES), gamma(0.9, 0.0)),
    of(
        "gae",
        "turns",
        "past an observation value and advantage are carried on without discount",
        rewarded(TURN_REWARDS, TURNS, TURN_VALUES),
        gamma(0.9, 0.95),
    ),
    of(
        "gae",
        "turns_nan",
        "NaN where masked reaches nothing",
        rewarded(TURN_REWARDS, TURNS, TURN_VALUES, nan=True),
        gamma(0.9, 0.95),
    ),
    of(
        "decoupled_gae",
        "two_lambdas",
        "returns have a lambda of their own",
        rewarded(TURN_REWARDS, TURNS, TURN_VALUES),
        {"gamma": 0.9, "lambda_policy": 0.8, "lambda_value": 1.0},
    ),
    of(
        "decoupled_gae",
        "by_length",
        "lambda by the number of sampled tokens, never below 0",
        rewarded(TURN_REWARDS, TURNS, TURN_VALUES),
        {"gamma": 1.0, "alpha": 0.25, "lambda_value": 1.0},
    ),
    *(
        of(
            "bootstrap_truncated",
            label,
            "the value of what was cut off stands at the last sampled token, and NaN at finished sequences is not read",
            {**rewarded(TURN_REWARDS, TURNS, nan=label == "turns_nan"), "next_values": [0.5, None, -0.75]}
            | {"truncated": [1, 0, 1]},
            gamma(0.9),
        )
        for label in ("turns", "turns_nan")
    ),
    of(
        "optimal_token_baseline",
        "by_hand",
        "the return that varied more weighs more; a place that one sequence alone reaches gives 0",
        {
            "token_rewards": [[0.0, 1.0], [0.5]],
            "mask": [[1, 1], [1]],
            "logprobs": [[0.0, 0.0], [0.0]],
            "sum_squared_probs": [[1.25, 1.0], [1.75]],
            "groups": [4, 4],
        },
        gamma(1.0),
        hand={"advantages": [["3/8", "0"], ["-1/8"]]},
        arithmetic="W = 1/4 and 3/4; B = (1/4 * 1 + 3/4 * 1/2) / 1 = 5/8",
    ),
    *(
        of("optimal_token_baseline", label, pins, BASELINE | more, gamma(discount))
        for label, pins, discount, more in (
            ("turns", "returns and weights run through observations", 1.0, {}),
            ("turns_nan", "NaN where masked reaches nothing", 1.0, {k: hidden(BASELINE[k], TURNS) for k in OF_TOKENS}),
            ("discounted", "a discount from one sampled token to the next", 0.9, {}),
            ("by_turn", "tokens are numbered within their turn", 0.9, {"turns": TURN_NUMBERS}),
            ("alone", "a group of one gives 0", 1.0, {"groups": [1, 2, 1]}),
        )
    ),
    of(
        "whiten",
        "four_tokens",
        "tokens of the whole batch, Bessel's correction",
        {"values": [[1.0, 3.0], [5.0, 7.0, 100.0]], "mask": [[1, 1], [1, 1, 0]]},
        {"epsilon": 0.0},
    ),
    of(
        "whiten",
        "population",
        "without the correction",
        {"values": [[1.0, 3.0], [1.0, 3.0, 9.0]], "mask": [[1, 1], [1, 1, 0]]},
        {"epsilon": 0.0, "ddof": 0},
        hand={"advantages": [["-1", "1"], ["-1", "1", "0"]]},
        arithmetic="mean 2, variance 1",
    ),
    of(
        "whiten",
        "nan",
        "NaN where masked reaches nothing",
        {"values": [[1.0, 3.0, None], [None, 5.0, 7.5]], "mask": [[1, 1, 0], [0, 1, 1]]},
        {"epsilon": 1e-8},
    ),
    of(
        "whiten",
        "one_token",
        "one token has no spread: 0",
        {"values": [[0.7, 0.0]], "mask": [[1, 0]]},
        {"epsilon": 1e-8},
        hand={"advantages": [["0", "0"]]},
        arithmetic="it is its own mean",
    ),
    of(
        "whiten",
        "identical_0.1",
        "equal values give exactly 0",
        {"values": [[0.1] * 5, [0.1] * 3], "mask": ones([5, 3])},
        {"epsilon": 1e-8},
        hand={"advantages": [["0"] * 5, ["0"] * 3]},
        arithmetic="every value is the mean",
    ),
    of(
        "whiten",
        "cut",
        "moments of micro-batches are merged: no cut changes the result",
        {"values": [[1.0, 3.0, -2.0], [5.0, 7.0], [0.5, 0.25], [2.0]], "mask": [[1, 1, 1], [1, 1], [1, 0], [1]]},
        {"epsilon": 1e-8, "cuts": [[2], [0, 3], [1]]},
    ),
    of(
        "reinforce_pp",
        "outcome",
        "long sequences weigh more in the moments",
        rewarded(ENDS, ones(LENGTHS)),
        {"gamma": 1.0, "epsilon": 1e-8},
    ),
    of(
        "reinforce_pp",
        "turns",
        "several turns",
        rewarded(TURN_REWARDS, TURNS),
        {"gamma": 0.9, "epsilon": 1e-8},
    ),
    of(
        "reinforce_pp_baseline",
        "two_groups",
        "centred by group, then whitened over tokens",
        {
            "rewards": [1.0, 0.0, 0.5, 0.25, 0.75, 0.0],
            "groups": [0, 0, 0, 1, 1, 1],
            "mask": ones([2, 4, 1, 3, 5, 2]),
        },
        {"epsilon": 1e-8},
    ),
    of(
        "reinforce_pp_baseline",
        "singleton",
        "a group of one is 0 before the whitening",
        {"rewards": [0.75, 1.0, 0.25], "groups": [0, 1, 1], "mask": ones([2, 3, 1])},
        {"epsilon": 1e-8},
    ),
    of(
        "process_group_norm",
        "two_sequences",
        "normalised over all steps of the group, summed from the token on",
        {
            "step_rewards": [[0.0, 1.0, 0.0, 0.0], [None, 0.0, 0.0]],
            "step_mask": [[0, 1, 0, 1], [0, 1, 1]],
            "mask": [[1, 1, 1, 1], [0, 1, 1]],
            "groups": [0, 0],
        },
        {"epsilon": 0.0},
        hand={"advantages": [["1", "1", "-1/2", "-1/2"], ["0", "-1", "-1/2"]]},
        arithmetic="rewards 1, 0, 0, 0 give 3/2, -1/2, -1/2, -1/2; first: 3/2 - 1/2 until the first end, then -1/2",
    ),
    of(
        "turn_level",
        "two_turns",
        "like turns are compared; the outcome is earned at the end of the last turn",
        {
            "turn_rewards": [[1.0, 0.0], [0.0, 0.5], [0.5]],
            "outcome_advantages": [0.5, -0.25, 1.0],
            "turns": [[0, 0, -1, 1], [0, -1, 1, 1], [0, 0]],
            "groups": [0, 0, 0],
        },
        {"gamma": 0.5, "turn_coefficient": 0.5, "epsilon": 1e-6},
    ),
    of(
        "turn_level",
        "three_turns",
        "credit comes from all later turns",
        {
            "turn_rewards": [[1.0, 0.0, 0.5], [0.0, 0.5, 1.0], [0.5, 0.25], [0.25, 1.0, 0.0]],
            "outcome_advantages": [0.5, -0.25, 1.0, -1.0],
            "turns": [[0, -1, 1, 2], [0, 1, 1, -1, 2], [0, 1], [0, 1, 2, 2]],
            "groups": [0, 0, 1, 1],
        },
        {"gamma": 0.75, "turn_coefficient": 2.0, "epsilon": 1e-6},
    ),
)
