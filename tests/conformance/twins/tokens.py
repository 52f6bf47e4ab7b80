"""Advantages of tokens: returns, GAE, whitening, steps and turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.twins.advantages import group_centred, group_norm, normalised
from conformance.twins.numbers import ONE, ZERO, Decimal, Row, dec, kept, placed

Inputs = Mapping[str, Any]


def along(inputs: Inputs, of_row: Callable[[int, Sequence[Any]], Row]) -> list[Row]:
    """Results of the sampled tokens of each sequence, at their places."""
    return [placed(of_row(i, mask), mask) for i, mask in enumerate(inputs["mask"])]


def returned(rewards: Row, gamma: Decimal) -> Row:
    """G_t = r_t + gamma G_{t+1}."""
    found: Row = []
    for reward in reversed(rewards):
        found.append(reward + gamma * (found[-1] if found else ZERO))
    return found[::-1]


def discounted_returns(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Discounted sums over the sampled tokens alone: an observation is no step."""
    gamma = dec(params["gamma"])
    return {"returns": along(inputs, lambda i, mask: returned(kept(inputs["token_rewards"][i], mask), gamma))}


def _gae(rewards: Row, values: Row, gamma: Decimal, lambd: Decimal) -> Row:
    found: Row = []
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else ZERO
        delta = rewards[t] + gamma * following - values[t]
        found.append(delta + gamma * lambd * (found[-1] if found else ZERO))
    return found[::-1]


def gae_with(inputs: Inputs, gamma: Decimal, of_advantages: Sequence[Decimal], of_returns: Sequence[Decimal]) -> Any:
    """GAE over the sampled tokens, with a lambda a sequence for advantages and one for returns."""

    def rows(lambdas: Sequence[Decimal], add_values: bool) -> list[Row]:
        def of_row(i: int, mask: Sequence[Any]) -> Row:
            rewards, values = kept(inputs["token_rewards"][i], mask), kept(inputs["values"][i], mask)
            found = _gae(rewards, values, gamma, lambdas[i])
            return [a + v for a, v in zip(found, values, strict=True)] if add_values else found

        return along(inputs, of_row)

    return {"advantages": rows(of_advantages, False), "returns": rows(of_returns, True)}


def gae(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Observations are passed over: value and advantage are carried on."""
    lambdas = [dec(params["lambda"])] * len(inputs["mask"])
    return gae_with(inputs, dec(params["gamma"]), lambdas, lambdas)


def decoupled_gae(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """VC-PPO and VAPO: a lambda of its own for the returns, one by length for the advantages if asked."""
    count = len(inputs["mask"])
    if "alpha" in params:
        policy = [max(ZERO, 1 - 1 / (dec(params["alpha"]) * sum(mask))) for mask in inputs["mask"]]
    else:
        policy = [dec(params["lambda_policy"])] * count
    return gae_with(inputs, dec(params["gamma"]), policy, [dec(params["lambda_value"])] * count)


def bootstrap_truncated(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """r += gamma V(next) at the last sampled token of each sequence that a limit cut off."""
    gamma = dec(params["gamma"])

    def of_row(i: int, mask: Sequence[Any]) -> Row:
        rewards = kept(inputs["token_rewards"][i], mask)
        if rewards and inputs["truncated"][i]:
            rewards[-1] += gamma * dec(inputs["next_values"][i])
        return rewards

    return {"token_rewards": along(inputs, of_row)}


def optimal_token_baseline(inputs: Inputs, params: Inputs, alone_is_zero: bool = True) -> dict[str, Any]:
    """Returns less the mean of the group at the same place, each weighed by 1 - 2 p + sum p^2 up to there."""
    gamma, mask = dec(params["gamma"]), inputs["mask"]
    returns = [returned(kept(row, marks), gamma) for row, marks in zip(inputs["token_rewards"], mask, strict=True)]
    energies = [
        [1 - 2 * p.exp() + square for p, square in zip(kept(now, marks), kept(squares, marks), strict=True)]
        for now, squares, marks in zip(inputs["logprobs"], inputs["sum_squared_probs"], mask, strict=True)
    ]
    places: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for i, group in enumerate(inputs["groups"]):
        turns = (
            [int(turn) for turn in kept(inputs["turns"][i], mask[i])] if "turns" in inputs else [0] * len(returns[i])
        )
        for t, turn in enumerate(turns):
            places.setdefault((group, turn, t - turns.index(turn)), []).append((i, t))
    found = [list(row) for row in returns]
    for there in places.values():
        weights = [sum(energies[i][: t + 1], ZERO) for i, t in there]
        products = [w * returns[i][t] for w, (i, t) in zip(weights, there, strict=True)]
        baseline = sum(products, ZERO) / sum(weights, ZERO)
        for i, t in there:
            found[i][t] = returns[i][t] - baseline if len(there) > 1 else returns[i][t] * (not alone_is_zero)
    return {"advantages": along(inputs, lambda i, marks: found[i])}


def whitened(rows: list[Row], inputs: Inputs, epsilon: Decimal, ddof: int = 1) -> list[Row]:
    """(v - mean) / (std + epsilon) over the sampled tokens of the batch."""
    flat = [v for values, mask in zip(rows, inputs["mask"], strict=True) for v in kept(values, mask)]
    result = iter(normalised(flat, epsilon, ddof))
    return [[next(result) if m else ZERO for m in mask] for mask in inputs["mask"]]


def whiten(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Whitening alone."""
    return {"advantages": whitened(inputs["values"], inputs, dec(params["epsilon"]), params.get("ddof", 1))}


def reinforce_pp(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """REINFORCE++: returns of tokens, then whitening."""
    rows = discounted_returns(inputs, params)["returns"]
    return {"advantages": whitened(rows, inputs, dec(params["epsilon"]))}


def reinforce_pp_baseline(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """REINFORCE++-baseline: centred within the group, spread over tokens, then whitening."""
    values = group_centred(inputs, params)["advantages"]
    rows = [[value] * len(mask) for value, mask in zip(values, inputs["mask"], strict=True)]
    return {"advantages": whitened(rows, inputs, dec(params["epsilon"]))}


def process_group_norm(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """GRPO with process rewards: normalised over all steps of the group, summed from the token on."""
    ends = [(i, t) for i, marks in enumerate(inputs["step_mask"]) for t, m in enumerate(marks) if m]
    steps = {
        "rewards": [inputs["step_rewards"][i][t] for i, t in ends],
        "groups": [inputs["groups"][i] for i, _ in ends],
    }
    values = dict(zip(ends, group_norm(steps, params)["advantages"], strict=True))
    return {
        "advantages": along(
            inputs, lambda i, mask: returned([values.get((i, t), ZERO) for t, m in enumerate(mask) if m], ONE)
        )
    }


def turn_level(inputs: Inputs, params: Inputs) -> dict[str, Any]:
    """Normalised rewards of the turns from here on, and the outcome at the end of the last one."""
    gamma, weight = dec(params["gamma"]), dec(params["turn_coefficient"])
    counts = [max(turns) + 1 for turns in inputs["turns"]]
    credit = [[ZERO] * count for count in counts]
    for turn in range(max(counts)):
        there = [i for i, count in enumerate(counts) if count > turn]
        part = {
            "rewards": [inputs["turn_rewards"][i][turn] for i in there],
            "groups": [inputs["groups"][i] for i in there],
        }
        for i, value in zip(there, group_norm(part, params)["advantages"], strict=True):
            credit[i][turn] = weight * value + (dec(inputs["outcome_advantages"][i]) if turn == counts[i] - 1 else 0)
    credit = [returned(values, gamma) for values in credit]
    rows = [[credit[i][turn] if turn >= 0 else ZERO for turn in turns] for i, turns in enumerate(inputs["turns"])]
    return {"advantages": rows}


TWINS = {
    twin.__name__: twin
    for twin in (
        discounted_returns,
        gae,
        decoupled_gae,
        bootstrap_truncated,
        optimal_token_baseline,
        whiten,
        reinforce_pp,
        reinforce_pp_baseline,
        process_group_norm,
        turn_level,
    )
}
