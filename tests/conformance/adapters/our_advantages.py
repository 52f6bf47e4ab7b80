"""This project's advantages and changes of rewards, called as functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, numbers
from conformance.adapters.packed import WIDE, computes, layout, packed, unpacked
from rft_algos import advantages
from rft_algos.packed.segments import segment_lengths
from rft_algos.rewards import kl_penalty, shaping
from rft_algos.schedules import controllers

# advantages of sequences


@computes(
    "advantage",
    "group_norm",
    "group_centred",
    "batch_std",
    "leave_one_out",
    "max_rl",
    "gpg",
    "pass_at_k",
    "best_of_group",
)
def of_groups(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Functions of rewards and groups."""
    inputs = case["inputs"]
    function = getattr(advantages, case["name"])
    found = function(numbers(inputs["rewards"], dtype), torch.tensor(inputs["groups"]), **case["params"])
    return {"advantages": found.tolist()}


@computes("advantage", "cpgd")
def cpgd(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """CPGD's weights."""
    return of_groups(case, dtype)


@computes("advantage", "opo")
def opo(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """OPO, with lengths."""
    inputs = case["inputs"]
    columns = (numbers(inputs["rewards"], dtype), torch.tensor(inputs["groups"]), torch.tensor(inputs["lengths"]))
    return {"advantages": advantages.opo(*columns).tolist()}


@computes("advantage", "remax")
def remax(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """ReMax, with greedy rewards."""
    columns = (numbers(case["inputs"][key], dtype) for key in ("rewards", "greedy_rewards"))
    return {"advantages": advantages.remax(*columns).tolist()}


@computes("advantage", "gdpo", "gdpo_batch")
def gdpo(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """GDPO, and with its last step."""
    inputs, epsilon = case["inputs"], case["params"]["epsilon"]
    parts, weight = (
        torch.stack([numbers(row, dtype) for row in inputs["components"]]),
        numbers(inputs["weights"], dtype),
    )
    found = advantages.gdpo(parts, torch.tensor(inputs["groups"]), weight, epsilon=epsilon)
    if case["name"] == "gdpo_batch":
        everyone = torch.ones_like(found, dtype=torch.bool)
        found = advantages.whiten(found, everyone, advantages.moments(found, everyone), epsilon=epsilon)
    return {"advantages": found.tolist()}


# advantages of tokens


@computes("advantage", "discounted_returns", "gae", "decoupled_gae")
def over_time(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns and GAE."""
    inputs, params, mask = case["inputs"], case["params"], case["inputs"]["mask"]
    mask_T, ids_T = layout(case)
    rewards_T = packed(inputs["token_rewards"], dtype)
    if case["name"] == "discounted_returns":
        returns_T = advantages.discounted_returns(rewards_T, mask_T, ids_T, gamma=params["gamma"])
        return {"returns": unpacked(returns_T, mask)}
    values_T = packed(inputs["values"], dtype)
    columns = (rewards_T, values_T, mask_T, ids_T)
    if case["name"] == "gae":
        found = advantages.gae(*columns, gamma=params["gamma"], lambd=params["lambda"])
    else:
        policy: Any = params.get("lambda_policy")
        if "alpha" in params:
            lengths_T = segment_lengths(mask_T, ids_T, dtype=WIDE)
            policy = advantages.length_adaptive_lambda(lengths_T, alpha=params["alpha"])
        lambdas = {"lambd_policy": policy, "lambd_value": params["lambda_value"]}
        found = advantages.decoupled_gae(*columns, gamma=params["gamma"], **lambdas)
    return {key: unpacked(rows, mask) for key, rows in zip(("advantages", "returns"), found, strict=True)}


@computes("advantage", "bootstrap_truncated")
def bootstrap_truncated(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rewards with the value of what was cut off."""
    inputs = case["inputs"]
    mask_T, ids_T = layout(case)
    found_T = advantages.bootstrap_truncated(
        packed(inputs["token_rewards"], dtype),
        numbers(inputs["next_values"], dtype),
        numbers(inputs["truncated"], torch.bool),
        mask_T,
        ids_T,
        **case["params"],
    )
    return {"token_rewards": unpacked(torch.where(mask_T, found_T, 0.0), inputs["mask"])}


@computes("advantage", "optimal_token_baseline")
def optimal_token_baseline(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns less a baseline of the token's own place."""
    inputs = case["inputs"]
    mask_T, ids_T = layout(case)
    found_T = advantages.optimal_token_baseline(
        *(packed(inputs[key], dtype) for key in ("token_rewards", "logprobs", "sum_squared_probs")),
        mask_T,
        ids_T,
        torch.tensor(inputs["groups"]),
        turn_ids_T=packed(inputs["turns"], torch.int64) if "turns" in inputs else None,
        **case["params"],
    )
    return {"advantages": unpacked(found_T, inputs["mask"])}


def whitened(values_T: Tensor, case: Case) -> dict[str, Any]:
    """Values of tokens, whitened over the batch."""
    mask_T, ids_T = layout(case)
    parts = [torch.isin(ids_T, torch.tensor(rows)) for rows in case["params"].get("cuts", [ids_T.unique().tolist()])]
    moments, *others = [advantages.moments(values_T[part_T], mask_T[part_T]) for part_T in parts]
    for other in others:
        moments = moments.merge(other)
    options = {"epsilon": case["params"]["epsilon"], "ddof": case["params"].get("ddof", 1)}
    return {"advantages": unpacked(advantages.whiten(values_T, mask_T, moments, **options), case["inputs"]["mask"])}


@computes("advantage", "whiten")
def whiten(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Whitening alone."""
    return whitened(packed(case["inputs"]["values"], dtype), case)


@computes("advantage", "reinforce_pp")
def reinforce_pp(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns, then whitening."""
    rows = over_time({**case, "name": "discounted_returns"}, dtype)["returns"]
    return whitened(packed(rows, WIDE), case)


@computes("advantage", "reinforce_pp_baseline")
def reinforce_pp_baseline(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Centred by group, then whitening over tokens."""
    inputs = case["inputs"]
    centred = advantages.group_centred(numbers(inputs["rewards"], dtype), torch.tensor(inputs["groups"]))
    _, ids_T = layout(case)
    return whitened(centred[ids_T], case)


@computes("advantage", "process_group_norm")
def process_group_norm(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rewards of steps."""
    inputs = case["inputs"]
    mask_T, ids_T = layout(case)
    found = advantages.process_group_norm(
        packed(inputs["step_rewards"], dtype),
        packed(inputs["step_mask"], torch.bool),
        mask_T,
        ids_T,
        torch.tensor(inputs["groups"]),
        epsilon=case["params"]["epsilon"],
    )
    return {"advantages": unpacked(found, inputs["mask"])}


@computes("advantage", "turn_level")
def turn_level(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rewards of turns."""
    inputs, turns = case["inputs"], case["inputs"]["turns"]
    width = max(len(row) for row in inputs["turn_rewards"])
    ids_T = torch.tensor([i for i, row in enumerate(turns) for _ in row])
    found = advantages.turn_level(
        torch.stack([numbers([*row, *[None] * (width - len(row))], dtype) for row in inputs["turn_rewards"]]),
        numbers(inputs["outcome_advantages"], dtype),
        torch.tensor([turn for row in turns for turn in row]),
        ids_T,
        torch.tensor(inputs["groups"]),
        **case["params"],
    )
    return {"advantages": unpacked(found, turns)}


# rewards


@computes(
    "shaping", "soft_overlong_penalty", "stop_properly", "cosine_length_reward", "kimi_length_reward", "clip_rewards"
)
def shaped(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rewards of sequences."""
    inputs, name = case["inputs"], case["name"]
    types = {"rewards": dtype, "truncated": torch.bool, "correct": torch.bool, "lengths": WIDE, "groups": torch.int64}
    columns = [torch.tensor(values, dtype=types[key]) for key, values in inputs.items()]
    if name == "clip_rewards":
        return {"rewards": kl_penalty.clip_rewards(columns[0], case["params"]["limit"]).tolist()}
    return {"rewards": getattr(shaping, name)(*columns, **case["params"]).tolist()}


@computes("shaping", "truncated_keep")
def truncated_keep(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The mask without sequences that did not finish."""
    kept_T = shaping.truncated_keep(numbers(case["inputs"]["finished"], torch.bool), *layout(case))
    return {"mask": unpacked(kept_T.to(dtype), case["inputs"]["mask"])}


@computes("shaping", "kl_penalised", "token_rewards")
def penalised(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The price of divergence."""
    inputs = case["inputs"]
    columns = (numbers(inputs["rewards"], dtype), packed(inputs["kl"], dtype), *layout(case))
    found = getattr(kl_penalty, case["name"])(*columns, **case["params"])
    if case["name"] == "kl_penalised":
        return {"rewards": found.tolist()}
    return {"token_rewards": unpacked(found, inputs["mask"])}


@computes("shaping", "combine", "combine_normalised")
def combined(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Sums of components."""
    inputs = case["inputs"]
    columns = [torch.stack([numbers(row, dtype) for row in inputs["components"]]), numbers(inputs["weights"], dtype)]
    if case["name"] == "combine_normalised":
        columns.append(torch.tensor(inputs["groups"]))
    return {"rewards": getattr(kl_penalty, case["name"])(*columns, **case["params"]).tolist()}


@computes("shaping", "running_scale")
def running_scale(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Batches on the scale of all batches so far, their own included."""
    so_far, found = shaping.RunningMoments(), []
    for batch in case["inputs"]["batches"]:
        values = numbers(batch, dtype)
        so_far = so_far.update(values)
        options = {"minus_mean": bool(case["params"]["minus_mean"]), "epsilon": case["params"]["epsilon"]}
        found.append(so_far.normalise(values, **options).tolist())
    return {"rewards": found}


@computes("shaping", "adaptive_kl")
def adaptive_kl(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The controller of beta, update by update."""
    controller, found = controllers.AdaptiveKl(**case["params"]), []
    for divergence_now, count in zip(case["inputs"]["kl"], case["inputs"]["num_samples"], strict=True):
        controller = controller.updated(divergence_now, count)
        found.append(controller.coefficient)
    return {"coefficients": found}
