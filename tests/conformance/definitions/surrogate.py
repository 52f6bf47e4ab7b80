"""Surrogates: loss of every token, aggregated loss, gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.definitions.case import Case, Draw, Source, added, hidden, ones, spread

SOURCES = {
    "ppo_clip": Source("1707.06347", "equation 7; unequal bounds from 2503.14476"),
    "dual_clip": Source("1912.09729", "dual clip"),
    "two_sided": Source("2505.07291", "two-sided clipping"),
    "cispo": Source("2506.13585", "equations 4 and 5"),
    "sapo": Source("2511.20347", "the soft gate"),
    "gspo": Source("2507.18071", "equations 5 to 7"),
    "gspo_token": Source("2507.18071", "equations 13 and 14"),
    "gmpo": Source("2507.20673", "the objective"),
    "cpgd": Source("2505.12504", "the clipped objective"),
    "policy_drift": Source("2505.12504", "policy drift; the limit is of the authors' code"),
    "dppo_tv": Source("2602.04879", "binary total variation"),
    "dppo_kl": Source("2602.04879", "binary KL divergence"),
    "clip_cov": Source("2505.22617", "Clip-Cov"),
    "kl_cov": Source("2505.22617", "KL-Cov; |log r| is of the authors' code"),
    "kl_cov_selection": Source("2505.22617", "covariances and the selection of KL-Cov"),
    "reinforce": Source("Williams 1992", "REINFORCE"),
    "importance_weighted": Source("1707.06347", "equation 6"),
    "squared_log_ratio": Source("2501.12599", "the penalty of mirror descent"),
    "dro": Source("2405.19107", "the policy's gradient; 2501.12599"),
    "dro_sequence": Source("2405.19107", "the objective over whole responses; 2501.12599, section 2.3"),
    "vespo": Source("2602.10693", "the deployed kernel"),
    "topr": Source("2503.14286", "the canonical setting"),
    "dppo_top_k": Source("2602.04879", "the top-K approximation, with divergences that are given"),
    "top_k_divergence": Source("2602.04879", "the top-K approximation; KL with an epsilon at the remainders"),
    "decoupled_ppo": Source("2110.00641", "the decoupled objective; 2505.24298"),
}
LENGTHS = [4, 2, 6]
OLD = Draw(11).rows(LENGTHS, -3.5, -1.6)
MOVES = [[0.05, 0.35, -0.4, 0.9], [-0.3, 0.15], [0.02, -0.6, 0.25, 1.4, -0.1, 0.31]]
"""Log-ratios on both sides of every bound used here, none at one."""
SMALL = [[0.0002, -0.0007, 0.0011, 0.0005], [-0.0009, 0.0001], [0.0004, 0.0003, -0.0002, 0.0009, 0.0002, 0.0001]]
NEW = added(OLD, MOVES)
SIGNS = [0.5, -0.75, -1.25]
ADVANTAGES = spread(SIGNS, OLD)
TOKEN_ADVANTAGES = Draw(12).rows(LENGTHS, -1.5, 1.5)
HOLES = [[1, 1, 0, 1], [1, 1], [1, 0, 0, 1, 1, 0]]
FAR_OLD = [[-0.5, -24.5, -1.0], [-23.75, -0.25, -2.0]]
FAR_NEW = [[-24.0, -0.5, -1.25], [-1.0, -23.5, -2.5]]
"""Log-ratios beyond +-20 and below it."""
TOKEN = {"aggregation": "token_mean"}
SEQUENCE = {"aggregation": "sequence_mean_token_mean"}
SUM = {"aggregation": "sequence_mean_token_sum"}
VESPO = {**TOKEN, "positive": [2.0, 3.0], "negative": [3.0, 2.0]}
DIVERGENCES = [[0.1, 0.4, 0.25, 0.31], [0.15, 0.5], [0.0, 0.19, 0.21, 0.6, 0.9, 0.05]]
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
SELECTED = [[0, 1, 0, 0], [0, 0], [0, 0, 0, 1, 0, 1]]
TINY = {"clip_low": 3e-4, "clip_high": 4e-4}


def rows(new: Any, old: Any, advantages: Any, mask: Any = None, extra: Any = None, nan: bool = False) -> dict[str, Any]:
    """Inputs of a surrogate."""
    mask = mask or ones([len(row) for row in new])
    found = {"logprobs": new, "old_logprobs": old, "advantages": advantages}
    found |= {} if extra is None else {"extra": extra}
    return {"mask": mask} | {key: hidden(row, mask) if nan else row for key, row in found.items()}


PLAIN = rows(NEW, OLD, ADVANTAGES)
MASKED = rows(NEW, OLD, ADVANTAGES, HOLES)
NAN = rows(NEW, OLD, ADVANTAGES, HOLES, nan=True)
ON_POLICY = rows(OLD, OLD, ADVANTAGES)
FAR = rows(FAR_NEW, FAR_OLD, spread([1.0, -0.5], FAR_OLD))


def of(name: str, label: str, pins: str, inputs: Mapping[str, Any], params: Mapping[str, Any], **more: Any) -> Case:
    """A case of this file."""
    return Case("surrogate", name, label, pins, SOURCES[name], inputs, params, **more)


def standard(name: str, params: Mapping[str, Any], extra: Any = None) -> list[Case]:
    """Moves on both sides of the bounds, observations inside, NaN at them, and the old policy itself."""

    def filled(inputs: dict[str, Any], nan: bool = False) -> dict[str, Any]:
        if extra is None:
            return inputs
        return {**inputs, "extra": hidden(extra, inputs["mask"]) if nan else extra}

    return [
        of(name, "moved", "both sides of every bound, both signs of the advantage", filled(PLAIN), params),
        of(name, "masked", "tokens of observations count nowhere", filled(MASKED), params),
        of(name, "masked_nan", "NaN where masked reaches neither loss nor gradient", filled(NAN, True), params),
        of(name, "on_policy", "at the old policy the gradient is the policy gradient", filled(ON_POLICY), params),
    ]


CASES = (
    of(
        "ppo_clip",
        "by_hand",
        "the clip acts at a high ratio of a good token and at a low one of a bad token",
        rows([[0.0, 0.0, 0.0]], [[-0.5, 0.5, 0.5]], [[2.0, 2.0, -2.0]]),
        {**TOKEN, "clip_low": 0.25, "clip_high": 0.25},
        hand={"gradient": [["0", "-0.4043537731417556", "0"]]},
        arithmetic="ratios e^0.5 = 1.65, e^-0.5 = 0.6065, 0.6065: clipped, free, clipped; -2 * 0.6065306597126334 / 3",
    ),
    *standard("ppo_clip", {**TOKEN, **CLIP}),
    of("ppo_clip", "clip_higher", "bounds of their own", PLAIN, {**TOKEN, **HIGHER}),
    of(
        "ppo_clip",
        "by_sequence",
        "GRPO's mean over sequences of means over tokens",
        PLAIN,
        {**SEQUENCE, **CLIP},
    ),
    of("ppo_clip", "far", "log-ratios beyond 20: the loss stays finite, the gradient is 0", FAR, {**TOKEN, **CLIP}),
    *standard("dual_clip", {**TOKEN, **CLIP, "dual": 3.0}),
    of(
        "dual_clip",
        "bound",
        "a bad token that became much likelier costs dual |A| and gives no gradient; a good one is not touched",
        rows([[-0.5, -0.5, -1.0]], [[-2.5, -2.5, -1.25]], [[-1.5, 1.5, -0.5]]),
        {**TOKEN, **CLIP, "dual": 3.0},
    ),
    *standard("two_sided", {**TOKEN, **CLIP, "delta": 2.0}),
    *standard("cispo", {**TOKEN, "clip_low": None, "clip_high": 1.0}),
    of("cispo", "two_bounds", "a lower bound, where one is given", PLAIN, {**TOKEN, **CLIP}),
    of(
        "cispo",
        "gradient_survives",
        "a clipped token keeps its gradient; the bound is 1 + clip_high",
        rows([[-0.5, -1.0]], [[-2.5, -1.0]], [[1.0, 1.0]]),
        {**TOKEN, "clip_low": None, "clip_high": 4.0},
        hand={"gradient": [["-5/2", "-1/2"]]},
        arithmetic="ratios e^2 = 7.39, held at 1 + 4, and 1; each over 2 tokens",
    ),
    *standard("sapo", {**SEQUENCE, "tau_positive": 1.0, "tau_negative": 1.05}),
    *standard("gspo", {**SEQUENCE, **TINY}),
    of(
        "gspo",
        "near",
        "ratios of sequences on both sides of bounds of 3e-4 and 4e-4",
        rows(added(OLD, SMALL), OLD, ADVANTAGES),
        {**SEQUENCE, **TINY},
        float32=False,
    ),
    of("gspo", "wide", "one gradient a token, spread evenly", PLAIN, {**SEQUENCE, "clip_low": 0.5, "clip_high": 0.5}),
    *standard("gspo_token", {**SEQUENCE, "clip_low": 0.5, "clip_high": 0.5}),
    of(
        "gspo_token",
        "token_advantages",
        "the ratio of the sequence, advantages of tokens",
        rows(NEW, OLD, TOKEN_ADVANTAGES),
        {**SEQUENCE, "clip_low": 0.5, "clip_high": 0.5},
    ),
    *standard("gmpo", {**SEQUENCE, "clip_low": 0.4, "clip_high": 0.4}),
    of(
        "gmpo",
        "empty_row",
        "a sequence without tokens is not counted",
        rows(NEW, OLD, ADVANTAGES, [[1, 1, 1, 1], [0, 0], [1, 1, 1, 1, 1, 1]]),
        {**SEQUENCE, "clip_low": 0.4, "clip_high": 0.4},
    ),
    *standard("cpgd", {**TOKEN, **CLIP}),
    *standard("policy_drift", {**TOKEN, "limit": 2.0}),
    *standard("dppo_tv", {**TOKEN, "limit_low": 0.15, "limit_high": 0.15, "max_ratio": 20.0}),
    of(
        "dppo_tv",
        "capped",
        "the weight is at most max_ratio",
        rows([[-2.0, -0.5]], [[-6.0, -0.75]], [[1.0, 1.0]]),
        {**TOKEN, "limit_low": 0.2, "limit_high": 0.2, "max_ratio": 20.0},
    ),
    *standard("dppo_kl", {**TOKEN, "limit_low": 0.05, "limit_high": 0.05, "max_ratio": 20.0}),
    of(
        "dppo_kl",
        "probable",
        "the divergence counts the other tokens too: 0.02 and 0.09 nats on either side of the limit",
        rows(
            [[-0.51, -0.36, -0.92, -1.2], [-0.105, -0.02]],
            [[-0.69, -0.69, -0.69, -0.69], [-0.22, -0.22]],
            spread([0.5, -0.75], [[0] * 4, [0] * 2]),
        ),
        {**TOKEN, "limit_low": 0.05, "limit_high": 0.05, "max_ratio": 20.0},
    ),
    of(
        "dppo_kl",
        "probable_bad",
        "a bad token may fall so far and no further",
        rows([[-0.51, -0.36, -0.92, -1.2]], [[-0.69, -0.69, -0.69, -0.69]], [[-0.5] * 4]),
        {**TOKEN, "limit_low": 0.05, "limit_high": 0.02, "max_ratio": 20.0},
    ),
    *standard("clip_cov", {**TOKEN, **CLIP}, SELECTED),
    *standard("kl_cov", {**TOKEN, "coefficient": 0.5}, SELECTED),
    of(
        "kl_cov_selection",
        "top_quarter",
        "the largest covariances over the batch",
        rows(NEW, OLD, TOKEN_ADVANTAGES, HOLES),
        {"fraction": 0.25},
    ),
    of(
        "kl_cov_selection",
        "at_least_one",
        "at least one token",
        rows(NEW, OLD, TOKEN_ADVANTAGES, HOLES, nan=True),
        {"fraction": 0.01},
    ),
    *standard("reinforce", TOKEN),
    *standard("importance_weighted", TOKEN),
    of("importance_weighted", "far", "log-ratios beyond 20 stay finite", FAR, TOKEN),
    *standard("dro", {**TOKEN, "tau": 0.5}),
    *standard("dro_sequence", {**SUM, "tau": 0.5}),
    of(
        "dro_sequence",
        "by_hand",
        "the penalty is of the sum over the response: its gradient is tau times that sum at every token",
        rows([[-0.5, -1.0]], [[-1.0, -1.25]], [[2.0, 2.0]]),
        {**SUM, "tau": 0.5},
        hand={"total": "201/64", "gradient": [["-13/8", "-13/8"]]},
        arithmetic="log-ratios 1/2 and 1/4; 2 (1/2 + 1) + 1/2 * (3/4)^2 / 2 = 3 + 9/64; -2 + 1/2 * 3/4",
    ),
    *standard("vespo", VESPO),
    of(
        "vespo",
        "unequal",
        "numbers of their own for good and for bad sequences, and far away no weight",
        rows(added(NEW, MOVES), OLD, ADVANTAGES),
        {**TOKEN, "positive": [1.0, 0.5], "negative": [0.5, 1.5]},
    ),
    *standard("topr", SUM),
    of("topr", "far", "a bad sequence that the policy no longer says gives next to nothing", FAR, SUM),
    of(
        "topr",
        "by_hand",
        "a good sequence has weight 1 however far it is, a bad one that rose as well",
        rows([[-1.0, -2.0], [-0.5]], [[-3.0, -3.0], [-2.0]], [[1.5, 1.5], [-1.0]]),
        SUM,
        hand={"loss": [["3/2", "3"], ["-1/2"]], "total": "2", "gradient": [["-3/4", "-3/4"], ["1/2"]]},
        arithmetic="-A log pi: 3/2, 3 and -1/2; (9/2 - 1/2) / 2; -A over 2 sequences",
    ),
    *standard("dppo_top_k", {**TOKEN, "limit_low": 0.2, "limit_high": 0.3, "max_ratio": 2.0}, DIVERGENCES),
    *(
        of(
            "top_k_divergence",
            f"{divergence}_{len(old[0])}",
            "the tokens and one remainder",
            {"old_logprobs": old, "logprobs": new},
            {"divergence": divergence, "epsilon": 1e-8},
        )
        for divergence in ("tv", "kl")
        for old, new in (
            ([[-1.2, -1.9, -2.5], [-0.4, -2.0, -3.5]], [[-0.9, -2.2, -2.4], [-0.7, -1.5, -3.0]]),
            ([[-0.5], [-3.0]], [[-0.25], [-2.0]]),
        )
    ),
    *standard("squared_log_ratio", TOKEN),
    *standard("decoupled_ppo", {**TOKEN, **CLIP}, Draw(13).rows(LENGTHS, 0.3, 2.0)),
)
