"""Advantages: rewards of sequences, groups and tokens in, how much better than expected out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import comb
from typing import Any

from conformance.twins.numbers import (
    ONE,
    ZERO,
    Decimal,
    Row,
    by_group,
    dec,
    mean,
    row,
    std,
    total,
)

Inputs = Mapping[str, Any]


def grouped(inputs: Inputs, of_group: Callable[[Row], Row]) -> dict[str, Any]:
    """Apply a function of a group's rewards to every group."""
    rewards, found = row(inputs["rewards"]), [ZERO] * len(inputs["rewards"])
    for places in by_group(inputs["groups"]).values():
        for place, value in zip(places, of_group([rewards[p] for p in places]), strict=True):
            found[place] = value
    return {"advantages": found}


def centred(rewards: Row) -> Row:
    """Rewards minus their mean; exactly 0 where all are equal."""
    if min(rewards) == max(rewards):
        return [ZERO] * len(rewards)
    middle = mean(rewards)
    return [r - middle for r in rewards]


def scaled(rewards: Row, scale: Decimal) -> Row:
    """Centred rewards over a scale; 0 stays 0 whatever the scale is."""
    return [c / scale if c else ZERO for c in centred(rewards)]


def normalised(rewards: Row, epsilon: Decimal, ddof: int = 1) -> Row:
    """(R - mean) / (std + epsilon)."""
    return scaled(rewards, std(rewards, ddof) + epsilon)


def group_norm(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GRPO: the reward normalised within its group."""
    return grouped(inputs, lambda rewards: normalised(rewards, dec(params["epsilon"])))


def group_centred(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Dr. GRPO: without the division."""
    return grouped(inputs, centred)


def batch_std(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Lite PPO: the spread of the whole batch."""
    scale = std(row(inputs["rewards"])) + dec(params["epsilon"])
    return grouped(inputs, lambda rewards: scaled(rewards, scale))


def leave_one_out(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """RLOO: the mean of the others is the baseline; nobody to compare with gives 0."""

    def of_group(rewards: Row) -> Row:
        if len(rewards) == 1 or min(rewards) == max(rewards):
            return [ZERO] * len(rewards)
        return [r - (total(rewards) - r) / (len(rewards) - 1) for r in rewards]

    return grouped(inputs, of_group)


def max_rl(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """MaxRL: centred, over the mean where that is positive."""

    def of_group(rewards: Row) -> Row:
        middle = mean(rewards)
        return [c / middle if middle > 0 else ZERO for c in centred(rewards)]

    return grouped(inputs, of_group)


def opo(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """OPO: the length-weighted mean is the baseline."""
    rewards, lengths, found = row(inputs["rewards"]), row(inputs["lengths"]), [ZERO] * len(inputs["rewards"])
    for places in by_group(inputs["groups"]).values():
        if len({rewards[p] for p in places}) > 1:
            baseline = total(lengths[p] * rewards[p] for p in places) / total(lengths[p] for p in places)
            for p in places:
                found[p] = rewards[p] - baseline
    return {"advantages": found}


def signal(inputs: Inputs) -> tuple[int, int, int]:
    """Sequences in groups of unequal rewards, groups of unequal rewards, groups."""
    groups = by_group(inputs["groups"]).values()
    with_signal = [places for places in groups if len({inputs["rewards"][p] for p in places}) > 1]
    return sum(len(places) for places in with_signal), len(with_signal), len(groups)


def gpg(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GPG: centred, times B over the number of sequences that have signal."""
    alpha = dec(len(inputs["rewards"])) / max(signal(inputs)[0], 1)
    return grouped(inputs, lambda rewards: [alpha * c for c in centred(rewards)])


def cpgd(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """CPGD: centred, times the weight of a prompt."""
    if params["weighting"] == "std":
        return group_norm(inputs, params)
    _, num_with_signal, num_groups = signal(inputs)
    filtered = min(dec(num_groups) / max(num_with_signal, 1), dec(params.get("max_weight", 3)))
    omega = filtered if params["weighting"] == "clip_filter" else ONE
    return grouped(inputs, lambda rewards: [omega * c for c in centred(rewards)])


def component_sum(inputs: Inputs, epsilon: Decimal, ddof: int = 1) -> Row:
    """The weighted sum of the components' own group-normalised advantages."""
    found = [ZERO] * len(inputs["groups"])
    for k, weight in enumerate(row(inputs["weights"])):
        rewards = [components[k] for components in inputs["components"]]
        one = grouped({"rewards": rewards, "groups": inputs["groups"]}, lambda group: normalised(group, epsilon, ddof))
        found = [f + weight * a for f, a in zip(found, one["advantages"], strict=True)]
    return found


def gdpo(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GDPO before its last step."""
    return {"advantages": component_sum(inputs, dec(params["epsilon"]))}


def gdpo_batch(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GDPO with its last step, normalisation over the sequences of the batch."""
    summed, epsilon = component_sum(inputs, dec(params["epsilon"])), dec(params["epsilon"])
    return {"advantages": normalised(summed, epsilon)}


def remax(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """ReMax: minus the reward of the greedy response."""
    pairs = zip(inputs["rewards"], inputs["greedy_rewards"], strict=True)
    return {"advantages": [dec(r) - dec(g) for r, g in pairs]}


def pass_at_k(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Pass@k training by counting draws; 0 where all draws are rewarded alike."""
    k = params["k"]

    def of_group(rewards: Row) -> Row:
        size, wrong = len(rewards), sum(1 for r in rewards if r == 0)
        if size < k:
            return [ZERO] * size
        failure = dec(comb(wrong, k)) / comb(size, k)
        sigma = (failure * (1 - failure)).sqrt()
        if sigma == 0:
            return [ZERO] * size
        wrong_draws = dec(comb(wrong - 1, k - 1)) / comb(size - 1, k - 1)
        return [(failure if r == 1 else failure - wrong_draws) / sigma for r in rewards]

    return grouped(inputs, of_group)


def best_of_group(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """The best gets its lead over the second best, over the spread."""

    def of_group(rewards: Row) -> Row:
        if len(rewards) == 1:
            return [ZERO]
        second, best = sorted(rewards)[-2:]
        lead = (best - second) / (std(rewards) + dec(params["epsilon"])) if best > second else ZERO
        return [lead if r == best else ZERO for r in rewards]

    return grouped(inputs, of_group)


TWINS = {
    twin.__name__: twin
    for twin in (
        group_norm,
        group_centred,
        batch_std,
        leave_one_out,
        max_rl,
        opo,
        gpg,
        cpgd,
        gdpo,
        gdpo_batch,
        remax,
        pass_at_k,
        best_of_group,
    )
}
