"""Routers of mixtures of experts: their losses, their choices and their balance."""

from __future__ import annotations

from conformance.definitions.case import Case, Draw, Source

SOURCES = {
    "load_balancing": Source("2101.03961", "equations 4 to 6, with k choices a token"),
    "sigmoid_load_balancing": Source("2412.19437", "equations 17 to 20, over the step in place of a sequence"),
    "router_z_loss": Source("2202.08906", "equation 5"),
    "biased_choice": Source("2412.19437", "equation 16"),
    "balanced_bias": Source("2408.15664", "algorithm 1, without the mean of its step"),
    "max_violation": Source("2408.15664", "section 4.1"),
    "load_entropy": Source("Shannon 1948", "entropy of the shares, over its largest"),
}
LOGITS = Draw(71).rows([5] * 7, -2.0, 2.0)
BIAS = [0.5, -1.0, 0.25, 0.0, 1.5]
LOADS = [[3, 1, 2], [0, 5, 1]]

CASES = (
    Case(
        "router",
        "load_balancing",
        "by_hand",
        "E times the sum of shares of rows and mean probabilities; no gradient through the choices",
        SOURCES["load_balancing"],
        {"logits": [[1.0, 0.0], [0.0, 1.0]]},
        {"num_choices": 1},
        hand={"loss": "1", "gradient": [["0", "0"], ["0", "0"]]},
        arithmetic="each expert has half of the rows, so 2 (P_1 + P_2) / 2 = 1 whatever the probabilities",
    ),
    Case(
        "router",
        "load_balancing",
        "two_choices",
        "k of E: even use gives k",
        SOURCES["load_balancing"],
        {"logits": LOGITS},
        {"num_choices": 2},
    ),
    Case(
        "router",
        "sigmoid_load_balancing",
        "biased",
        "the bias moves the choices and not the probabilities, which are shares of the sigmoids",
        SOURCES["sigmoid_load_balancing"],
        {"logits": LOGITS, "bias": BIAS},
        {"num_choices": 2},
    ),
    Case(
        "router",
        "router_z_loss",
        "by_hand",
        "the square of log Z, whose gradient is 2 log Z times the probabilities",
        SOURCES["router_z_loss"],
        {"logits": [[2.0], [-3.0]]},
        {},
        hand={"loss": ["4", "9"], "gradient": [["2"], ["-3"]]},
        arithmetic="one expert: log Z is its logit; 2 x 2 / 2 rows and 2 x -3 / 2",
    ),
    Case("router", "router_z_loss", "drawn", "five experts", SOURCES["router_z_loss"], {"logits": LOGITS}),
    Case(
        "router",
        "biased_choice",
        "by_hand",
        "chosen by sigmoid plus bias, not by logit plus bias",
        SOURCES["biased_choice"],
        {"logits": [[8.0, 4.0], [0.0, 1.0]], "bias": [0.0, 0.5]},
        {"num_choices": 1},
        hand={"chosen": [["0", "1"], ["0", "1"]]},
        arithmetic="sigmoids of 8 and 4 are 0.9997 and 0.982, with the bias 1.48; of 0 and 1 they are 0.5 and 0.73",
    ),
    Case(
        "router",
        "biased_choice",
        "drawn",
        "two of five",
        SOURCES["biased_choice"],
        {"logits": LOGITS, "bias": BIAS},
        {"num_choices": 2},
    ),
    Case(
        "router",
        "balanced_bias",
        "by_hand",
        "the sign of what an expert lacks, so that the mean stays",
        SOURCES["balanced_bias"],
        {"bias": [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "loads": [[3, 1, 2], [4, 1, 1]]},
        {"rate": 0.75},
        hand={"bias": [["1/4", "3/4", "0"], ["-1", "1/2", "1/2"]]},
        arithmetic="signs -1, 1, 0 of mean 0; -1, 1, 1 of mean 1/3: -4/3, 2/3, 2/3; times 3/4",
    ),
    Case(
        "router",
        "max_violation",
        "by_hand",
        "of each layer, over its own mean",
        SOURCES["max_violation"],
        {"loads": LOADS},
        {},
        hand={"violation": ["1/2", "3/2"]},
        arithmetic="3 / 2 - 1; 5 / 2 - 1",
    ),
    Case(
        "router",
        "load_entropy",
        "with_a_dead_expert",
        "0 log 0 is 0; even use gives 1",
        SOURCES["load_entropy"],
        {"loads": [*LOADS, [2, 2, 2]]},
    ),
)
