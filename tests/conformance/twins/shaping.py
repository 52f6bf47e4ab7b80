"""Changes to rewards before advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.twins.advantages import component_sum
from conformance.twins.numbers import (
    ONE,
    PI,
    ZERO,
    Decimal,
    by_group,
    clip,
    cosine,
    dec,
    kept,
    mean,
    placed,
    row,
    std,
    total,
)

Inputs = Mapping[str, Any]


def soft_overlong_penalty(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """0 until the buffer, falling to -factor at its end, and staying there."""
    start, buffer = dec(params["max_length"] - params["buffer"]), dec(params["buffer"])
    factor = dec(params["factor"])
    return {"rewards": [-factor * clip((length - start) / buffer, ZERO, ONE) for length in row(inputs["lengths"])]}


def stop_properly(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Truncated sequences keep a share of their reward."""
    share = dec(params["coefficient"])
    pairs = zip(row(inputs["rewards"]), inputs["truncated"], strict=True)
    return {"rewards": [share * r if cut else r for r, cut in pairs]}


def truncated_keep(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The mask without the tokens of sequences that did not finish."""
    rows = [
        [ONE if m and finished else ZERO for m in mask]
        for mask, finished in zip(inputs["mask"], inputs["finished"], strict=True)
    ]
    return {"mask": rows}


def cosine_length_reward(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """From one value at length 0 to another at the limit, along half a cosine."""
    limit = dec(params["max_length"])

    def reward(correct: Any, length: Decimal) -> Decimal:
        if length >= limit:
            return dec(params["exceeded"])
        short, long = (dec(params[f"{'correct' if correct else 'wrong'}_{end}"]) for end in ("short", "long"))
        return long + (short - long) * (1 + cosine(PI * length / limit)) / 2

    pairs = zip(inputs["correct"], row(inputs["lengths"]), strict=True)
    return {"rewards": [reward(correct, length) for correct, length in pairs]}


def kimi_length_reward(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """1/2 for the shortest of the group to -1/2 for the longest; wrong answers gain nothing."""
    lengths, found = row(inputs["lengths"]), [ZERO] * len(inputs["lengths"])
    for places in by_group(inputs["groups"]).values():
        shortest, longest = min(lengths[p] for p in places), max(lengths[p] for p in places)
        for p in places if longest > shortest else ():
            value = dec("0.5") - (lengths[p] - shortest) / (longest - shortest)
            found[p] = value if inputs["correct"][p] else min(ZERO, value)
    return {"rewards": found}


def kl_penalised(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """R - coefficient * sum of kl over the sampled tokens."""
    rows = zip(row(inputs["rewards"]), inputs["kl"], inputs["mask"], strict=True)
    return {"rewards": [r - dec(params["coefficient"]) * total(kept(kl, mask)) for r, kl, mask in rows]}


def token_rewards(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """-coefficient * kl at every sampled token, and the reward at the last one."""

    def of_row(reward: Decimal, kl: Any, mask: Any) -> list[Decimal]:
        costs = [-dec(params["coefficient"]) * v for v in kept(kl, mask)]
        return placed([*costs[:-1], costs[-1] + reward] if costs else [], mask)

    rows = zip(row(inputs["rewards"]), inputs["kl"], inputs["mask"], strict=True)
    return {"token_rewards": [of_row(*columns) for columns in rows]}


def combine(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The weighted sum of components."""
    weights = row(inputs["weights"])
    sums = [total(w * v for w, v in zip(weights, row(parts), strict=True)) for parts in inputs["components"]]
    return {"rewards": sums}


def combine_normalised(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The weighted sum of components normalised within their group."""
    return {"rewards": component_sum(inputs, dec(params["epsilon"]))}


def clip_rewards(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Rewards limited to +-limit."""
    limit = dec(params["limit"])
    return {"rewards": [clip(r, -limit, limit) for r in row(inputs["rewards"])]}


def running_scale(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Batches over the deviation of all rewards so far; while those are all equal, as they are."""
    so_far, found = [], []
    for batch in inputs["batches"]:
        so_far += row(batch)
        shift, scale = mean(so_far) if params["minus_mean"] else ZERO, std(so_far)
        found.append([(r - shift) / (scale + dec(params["epsilon"]) if scale else ONE) for r in row(batch)])
    return {"rewards": found}


def adaptive_kl(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), one step after another."""
    beta, found = dec(params["coefficient"]), []
    for divergence, count in zip(row(inputs["kl"]), row(inputs["num_samples"]), strict=True):
        error = clip(divergence / dec(params["target"]) - 1, dec("-0.2"), dec("0.2"))
        beta *= 1 + error * count / dec(params["horizon"])
        found.append(beta)
    return {"coefficients": found}


TWINS = {
    twin.__name__: twin
    for twin in (
        soft_overlong_penalty,
        stop_properly,
        truncated_keep,
        cosine_length_reward,
        kimi_length_reward,
        kl_penalised,
        token_rewards,
        combine,
        combine_normalised,
        clip_rewards,
        adaptive_kl,
        running_scale,
    )
}
