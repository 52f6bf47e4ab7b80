"""OpenRLHF: its losses, and the methods of `RemoteExperienceMaker` on a stand-in; run in OpenRLHF's own environment."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed looks for one when it is imported

import torch
from openrlhf.models import loss as losses
from openrlhf.models.utils import compute_approx_kl, compute_reward
from openrlhf.trainer.ppo_utils import length_penalty
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController
from torch import Tensor

from conformance.adapters.base import (
    Case,
    Compute,
    Key,
    Unfit,
    at_mask,
    leaf,
    numbers,
    padded,
    regular_groups,
    slope,
    unpadded,
)

PACKAGES = ("openrlhf", "torch", "deepspeed")
ENDLESS = 1e30
"""An upper bound that nothing reaches."""
REFUSED: dict[Key, str] = {
    ("advantage", "whiten"): "inside compute_advantages_and_returns: see reinforce_pp",
    ("correction", "mask_sequences_geometric"): "keeps the tokens' own ratios: see masked_geometric_with_ratios",
    ("shaping", "kl_penalised"): "the price of divergence is paid token by token: see token_rewards",
}


def regular(case: Case, name: str, dtype: torch.dtype) -> list[list[float]]:
    """Advantages of tokens from `compute_advantages_and_returns`, which wants one size of group, in order."""
    inputs, params = case["inputs"], case["params"]
    order, size = regular_groups(inputs["groups"] if "groups" in inputs else [0] * len(inputs["mask"]))
    mask = [inputs["mask"][i] if "mask" in inputs else [1] for i in order]
    rewards = numbers(inputs.get("rewards", [0.0] * len(mask)), dtype)[order]
    costs = [
        [0.0 if v is None else -v for v in row] for row in inputs.get("token_rewards", [[0.0] * len(m) for m in mask])
    ]
    experience = SimpleNamespace(
        index=list(range(len(mask))),
        rewards=rewards,
        action_mask=padded(mask, dtype),
        kl=padded(costs, dtype),
        values=None,
        info={},
    )
    args = SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=name, gamma=params.get("gamma", 1.0), lambd=1.0, no_std_norm=False)
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=size),
        reward=SimpleNamespace(clip_range=None),
    )
    maker: Any = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=name,
        kl_ctl=SimpleNamespace(value=1.0),
        get_cumulative_returns=lambda *given: RemoteExperienceMaker.get_cumulative_returns(maker, *given),
    )
    (made,) = RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    found = unpadded(torch.where(experience.action_mask > 0, made.advantages, 0.0), mask)
    return [found[order.index(i)] for i in range(len(order))]


def advantage(name: str) -> Compute:
    """An estimator of sequences or, where the case has tokens, of those."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        rows = regular(case, name, dtype)
        return {"advantages": rows if "mask" in case["inputs"] else [row[0] for row in rows]}

    return compute


def over_time(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`get_advantages_and_returns` and `get_cumulative_returns`, before any whitening."""
    inputs, params = case["inputs"], case["params"]
    maker: Any = None
    columns = [padded(inputs[key], dtype) for key in ("values", "token_rewards", "mask") if key in inputs]
    if case["name"] == "discounted_returns":
        found = RemoteExperienceMaker.get_cumulative_returns(maker, *columns, params["gamma"])
        return {"returns": at_mask(found, case)}
    both = RemoteExperienceMaker.get_advantages_and_returns(maker, *columns, params["gamma"], params["lambda"])
    return {key: at_mask(found, case) for key, found in zip(("advantages", "returns"), both, strict=True)}


def policy_loss(case: Case, **options: Any) -> losses.PolicyLoss:
    """A loss with the case's bounds."""
    params = case["params"]
    bounds = {"clip_eps_low": params.get("clip_low", 0.2), "clip_eps_high": params.get("clip_high", 0.2)}
    by_token = params.get("aggregation", "token_mean") == "token_mean"
    if params.get("aggregation") not in (None, "token_mean", "sequence_mean_token_mean"):
        raise Unfit("aggregates by token or by sequence alone")
    return losses.PolicyLoss(**bounds, token_level_loss=by_token, **options)


def surrogate(kind: str, dual: str | None = None) -> Compute:
    """`PolicyLoss`."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params = case["inputs"], case["params"]
        options: dict[str, Any] = {"policy_loss_type": kind, "dual_clip": params[dual] if dual else None}
        more: dict[str, Any] = {}
        old_BT = padded(inputs["old_logprobs"], dtype)
        if "extra" in inputs:
            options |= {"is_correction_level": "token", "is_correction_mode": "clip"}
            options |= {"is_correction_threshold": (0.0, ENDLESS)}
            more["rollout_log_probs"] = old_BT - padded(inputs["extra"], dtype, fill=1.0).log()
        variable_BT = leaf(padded(inputs["logprobs"], dtype))
        found = policy_loss(case, **options)(
            variable_BT, old_BT, padded(inputs["advantages"], dtype), padded(inputs["mask"], dtype), **more
        )[0]
        return {"total": found, "gradient": unpadded(slope(found, variable_BT), inputs["mask"])}

    return compute


def correction(level: str, mode: str) -> Compute:
    """The weight of a token, read off the derivative of the loss with respect to its advantage."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params = case["inputs"], case["params"]
        old_BT, mask_BT = padded(inputs["old_logprobs"], dtype), padded(inputs["mask"], dtype)
        advantages_BT = leaf(torch.ones_like(old_BT))
        options = {"is_correction_level": level, "is_correction_mode": mode}
        threshold = (params.get("low", 0.0), params.get("high", params.get("cap")))
        function = policy_loss(case, **options, is_correction_threshold=threshold)
        behaviour_BT = padded(inputs["behaviour_logprobs"], dtype)
        found = function(old_BT, old_BT, advantages_BT, mask_BT, rollout_log_probs=behaviour_BT)[0]
        return {"weights": at_mask(-slope(found, advantages_BT) * mask_BT.sum(), case)}

    return compute


def divergence(estimator: str, unbiased: bool = False) -> Compute:
    """`compute_approx_kl`."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs = case["inputs"]
        now = leaf(numbers(inputs["logprobs"], dtype))
        old = numbers(inputs["old_logprobs"], dtype) if "old_logprobs" in inputs else None
        reference = numbers(inputs["reference_logprobs"], dtype)
        found = compute_approx_kl(now, reference, old, kl_estimator=estimator, unbiased_gradient=unbiased)
        return {"value": found.tolist(), "gradient": slope(found, now).tolist()}

    return compute


def aggregation(by_token: bool) -> Compute:
    """`aggregate_loss`, added up over micro-batches with the counts of the step."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        values, mask = case["inputs"]["values"], case["inputs"]["mask"]
        total, slopes = torch.zeros((), dtype=dtype), {}
        for rows in case["params"].get("cuts", [list(range(len(mask)))]):
            values_BT = leaf(padded([values[i] for i in rows], dtype))
            found = losses.aggregate_loss(
                values_BT,
                padded([mask[i] for i in rows], dtype),
                token_level_loss=by_token,
                batch_num_tokens=sum(map(sum, mask)),
                global_batch_size=sum(1 for row in mask if sum(row)),
            )
            slopes |= dict(zip(rows, unpadded(slope(found, values_BT), [mask[i] for i in rows]), strict=True))
            total = total + found.detach()
        return {"total": total, "gradient": [slopes[i] for i in range(len(mask))]}

    return compute


def critic(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`ValueLoss`."""
    inputs = case["inputs"]
    values_BT = leaf(padded(inputs["values"], dtype))
    columns = (padded(inputs[key], dtype) for key in ("old_values", "returns", "mask"))
    found = losses.ValueLoss(clip_eps=case["params"].get("clip"))(values_BT, *columns)
    return {"total": found, "gradient": unpadded(slope(found, values_BT), inputs["mask"])}


def pairs(make: Any, references: bool = False) -> Compute:
    """Losses of pairs, which give their mean."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs = case["inputs"]
        both = [leaf(numbers(inputs[key], dtype)) for key in ("chosen", "rejected")]
        more: list[Tensor] = []
        if references:
            more = [numbers(inputs[key], dtype) for key in ("reference_chosen", "reference_rejected")]
        elif "margin" in inputs:
            more = [numbers(inputs["margin"], dtype)]
        found = make(case["params"])(*both, *more)
        mean = found[0] if isinstance(found, tuple) else found
        slopes = [slope(mean, side).tolist() for side in both]
        return {"total": mean} | dict(zip(("gradient_chosen", "gradient_rejected"), slopes, strict=True))

    return compute


def overlong(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`apply_overlong_penalty` on rewards of 0."""
    lengths, params = case["inputs"]["lengths"], case["params"]
    experience = SimpleNamespace(response_length=torch.tensor(lengths), rewards=torch.zeros(len(lengths), dtype=dtype))
    length_penalty.apply_overlong_penalty([experience], params["max_length"], params["buffer"], params["factor"])
    return {"rewards": experience.rewards.tolist()}


def stop_properly(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`apply_stop_properly_penalty`."""
    inputs = case["inputs"]
    truncated = numbers(inputs["truncated"], torch.bool)
    experience = SimpleNamespace(truncated=truncated, rewards=numbers(inputs["rewards"], dtype))
    length_penalty.apply_stop_properly_penalty([experience], case["params"]["coefficient"])
    return {"rewards": experience.rewards.tolist()}


def token_rewards(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`compute_reward`."""
    inputs = case["inputs"]
    rewards, kl_BT = numbers(inputs["rewards"], dtype), padded(inputs["kl"], dtype)
    found_BT = compute_reward(rewards, case["params"]["coefficient"], kl_BT, padded(inputs["mask"], dtype))
    return {"token_rewards": at_mask(found_BT, case)}


def clip_rewards(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`compute_reward` without divergence, one token a sequence."""
    rewards, limit = numbers(case["inputs"]["rewards"], dtype), case["params"]["limit"]
    one_B1 = torch.ones(len(rewards), 1, dtype=dtype)
    found_B1 = compute_reward(rewards, 0.0, 0 * one_B1, one_B1, reward_clip_range=(-limit, limit))
    return {"rewards": found_B1[:, 0].tolist()}


def adaptive_kl(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`AdaptiveKLController`."""
    params, found = case["params"], []
    controller = AdaptiveKLController(params["coefficient"], params["target"], params["horizon"])
    for divergence_now, count in zip(case["inputs"]["kl"], case["inputs"]["num_samples"], strict=True):
        controller.update(divergence_now, count)
        found.append(float(controller.value))
    return {"coefficients": found}


COMPUTE: dict[Key, Compute] = {
    ("advantage", "group_norm"): advantage("group_norm"),
    ("advantage", "group_centred"): advantage("dr_grpo"),
    ("advantage", "leave_one_out"): advantage("rloo"),
    ("advantage", "reinforce_pp"): advantage("reinforce"),
    ("advantage", "reinforce_pp_baseline"): advantage("reinforce_baseline"),
    ("advantage", "gae"): over_time,
    ("advantage", "discounted_returns"): over_time,
    ("surrogate", "ppo_clip"): surrogate("ppo"),
    ("surrogate", "dual_clip"): surrogate("ppo", "dual"),
    ("surrogate", "two_sided"): surrogate("ppo", "delta"),
    ("surrogate", "gspo"): surrogate("gspo"),
    ("surrogate", "decoupled_ppo"): surrogate("ppo"),
    ("kl", "k1"): divergence("k1"),
    ("kl", "k2"): divergence("k2"),
    ("kl", "k3"): divergence("k3"),
    ("kl", "straight_through"): divergence("k3", unbiased=True),
    ("kl", "unbiased_k3"): divergence("k3", unbiased=True),
    ("correction", "truncate_tokens"): correction("token", "clip"),
    ("correction", "mask_tokens"): correction("token", "mask"),
    ("correction", "masked_geometric_with_ratios"): correction("seq", "mask"),
    ("aggregation", "token_mean"): aggregation(True),
    ("aggregation", "sequence_mean_token_mean"): aggregation(False),
    ("value", "squared_value_loss"): critic,
    ("value", "clipped_value_loss"): critic,
    ("preference", "bradley_terry"): pairs(lambda params: losses.PairWiseLoss()),
    ("preference", "log_exp"): pairs(lambda params: losses.LogExpLoss()),
    ("preference", "dpo"): pairs(lambda params: losses.DPOLoss(**params), references=True),
    ("preference", "ipo"): pairs(lambda params: losses.DPOLoss(params["beta"], ipo=True), references=True),
    ("shaping", "soft_overlong_penalty"): overlong,
    ("shaping", "stop_properly"): stop_properly,
    ("shaping", "token_rewards"): token_rewards,
    ("shaping", "clip_rewards"): clip_rewards,
    ("shaping", "adaptive_kl"): adaptive_kl,
}
