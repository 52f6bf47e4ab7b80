"""verl's advantages and changes of rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from conformance.adapters.base import Case, Compute, Key, Unfit, at_mask, numbers, padded


def responses(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
    """Rewards at the last token of responses, their mask, and the groups."""
    inputs = case["inputs"]
    mask = inputs.get("mask", [[1] * n for n in inputs.get("lengths", [1] * len(inputs["rewards"]))])
    mask_BT = padded(mask, dtype)
    rewards_BT = torch.zeros_like(mask_BT)
    for i, reward in enumerate(inputs["rewards"]):
        rewards_BT[i, max(t for t, m in enumerate(mask[i]) if m)] = reward
    # groups are texts there, one a prompt
    return rewards_BT, mask_BT, np.array([f"prompt {g}" for g in inputs.get("groups", range(len(mask)))], dtype=object)


def advantage(name: str, **fixed: Any) -> Compute:
    """An estimator of `core_algos` on outcome rewards."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        rewards_BT, mask_BT, groups = responses(case, dtype)
        options = dict(fixed)
        if "epsilon" in case["params"]:
            options["epsilon"] = case["params"]["epsilon"]
        if name == "remax":
            options["reward_baselines"] = numbers(case["inputs"]["greedy_rewards"], dtype)
        else:
            options["index"] = groups
        found, _ = core_algos.ADV_ESTIMATOR_REGISTRY[name](
            token_level_rewards=rewards_BT, response_mask=mask_BT, **options
        )
        if "mask" in case["inputs"]:
            return {"advantages": at_mask(found, case)}
        return {"advantages": found[:, 0].tolist()}

    return compute


def token_baseline(name: str) -> Compute:
    """The baseline of a token's own place."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs = case["inputs"]
        if case["params"]["gamma"] != 1:
            raise Unfit("its returns have no discount")
        if "turns" in inputs:
            raise Unfit("tokens are numbered from the start of the sequence")
        found, _ = core_algos.ADV_ESTIMATOR_REGISTRY[name](
            token_level_rewards=padded(inputs["token_rewards"], dtype),
            response_mask=padded(inputs["mask"], dtype),
            index=np.array([f"prompt {g}" for g in inputs["groups"]], dtype=object),
            old_log_probs=padded(inputs["logprobs"], dtype),
            sum_pi_squared=padded(inputs["sum_squared_probs"], dtype),
        )
        return {"advantages": at_mask(found, case)}

    return compute


def gdpo(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Components come through the batch, whitening is over tokens."""
    inputs = case["inputs"]
    given = {"inputs": {**inputs, "rewards": [0.0] * len(inputs["groups"])}, "params": {}}
    rewards_BT, mask_BT, groups = responses(given, dtype)
    names = [f"part_{k}" for k in range(len(inputs["weights"]))]
    found, _ = core_algos.compute_gdpo_outcome_advantage(
        rewards_BT,
        mask_BT,
        groups,
        epsilon=case["params"]["epsilon"],
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": inputs["weights"]},
        non_tensor_batch={name: [row[k] for row in inputs["components"]] for k, name in enumerate(names)},
        batch={
            "prompts": torch.zeros(len(groups), 1),
            "attention_mask": torch.cat([mask_BT[:, :1], mask_BT], 1).long(),
        },
    )
    return {"advantages": found[:, 0].tolist()}


def over_time(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns as they are; the advantages of GAE come whitened, so they are taken as returns minus values."""
    inputs, params = case["inputs"], case["params"]
    rewards_BT, mask_BT = padded(inputs["token_rewards"], dtype), padded(inputs["mask"], dtype)
    if case["name"] == "gae":
        values_BT = padded(inputs["values"], dtype)
        _, returns_BT = core_algos.compute_gae_advantage_return(
            rewards_BT, values_BT, mask_BT, params["gamma"], params["lambda"]
        )
        return {"advantages": at_mask(returns_BT - values_BT, case), "returns": at_mask(returns_BT, case)}
    found, returns_BT = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards_BT, mask_BT, config=SimpleNamespace(gamma=params["gamma"])
    )
    if case["name"] == "discounted_returns":
        return {"returns": at_mask(returns_BT, case)}
    return {"advantages": at_mask(found, case)}


def whiten(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`masked_whiten`."""
    if case["params"].get("ddof", 1) == 0:
        raise Unfit("masked_whiten has Bessel's correction alone")
    values_BT, mask_BT = padded(case["inputs"]["values"], dtype), padded(case["inputs"]["mask"], dtype)
    return {"advantages": at_mask(torch_functional.masked_whiten(values_BT, mask_BT), case)}


def adaptive_kl(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`AdaptiveKLController`."""
    params, found = case["params"], []
    controller = core_algos.AdaptiveKLController(params["coefficient"], params["target"], params["horizon"])
    for divergence_now, count in zip(case["inputs"]["kl"], case["inputs"]["num_samples"], strict=True):
        controller.update(divergence_now, count)
        found.append(float(controller.value))
    return {"coefficients": found}


def token_rewards(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`compute_rewards`, the divergence being the log-ratio that it is handed."""
    rewards_BT, _, _ = responses(case, dtype)
    kl_BT = padded(case["inputs"]["kl"], dtype)
    found_BT = core_algos.compute_rewards(rewards_BT, kl_BT, torch.zeros_like(kl_BT), case["params"]["coefficient"])
    return {"token_rewards": at_mask(found_BT, case)}


def overlong(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`DAPORewardManager.run_single` on a stand-in whose score is 0."""
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    params = case["params"]
    buffer = SimpleNamespace(enable=True, len=params["buffer"], penalty_factor=params["factor"], log=False)

    async def penalties(lengths: Sequence[int]) -> list[float]:
        manager: Any = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: ""),
            compute_score=lambda **_: 0.0,
            is_async_reward_score=False,
            reward_router_address=None,
            overlong_buffer_cfg=buffer,
            max_resp_len=params["max_length"],
        )
        found = []
        for length in lengths:
            tensors = {"responses": torch.zeros(length), "attention_mask": torch.ones(length + 1, dtype=torch.int64)}
            others = {"data_source": "", "reward_model": {"ground_truth": ""}}
            item = SimpleNamespace(batch=tensors, non_tensor_batch=others)

            class Data(list[Any]):
                def __getitem__(self, place: Any, item: Any = item) -> Any:
                    return self if isinstance(place, slice) else item

            result = await DAPORewardManager.run_single(manager, Data([item]))
            found.append(float(result["reward_score"]))
        return found

    return {"rewards": asyncio.run(penalties(case["inputs"]["lengths"]))}


COMPUTE: dict[Key, Compute] = {
    ("advantage", "optimal_token_baseline"): token_baseline("tir_optimal_token_baseline"),
    ("advantage", "group_norm"): advantage("grpo"),
    ("advantage", "group_centred"): advantage("grpo", norm_adv_by_std_in_grpo=False),
    ("advantage", "leave_one_out"): advantage("rloo"),
    ("advantage", "opo"): advantage("opo"),
    ("advantage", "gpg"): advantage("gpg"),
    ("advantage", "best_of_group"): advantage("grpo_passk", config={"norm_adv_by_std_in_grpo": True}),
    ("advantage", "remax"): advantage("remax"),
    ("advantage", "reinforce_pp_baseline"): advantage("reinforce_plus_plus_baseline"),
    ("advantage", "gdpo_batch"): gdpo,
    ("advantage", "gae"): over_time,
    ("advantage", "discounted_returns"): over_time,
    ("advantage", "reinforce_pp"): over_time,
    ("advantage", "whiten"): whiten,
    ("shaping", "adaptive_kl"): adaptive_kl,
    ("shaping", "token_rewards"): token_rewards,
    ("shaping", "soft_overlong_penalty"): overlong,
}
ALSO: dict[Key, dict[str, Compute]] = {
    ("advantage", "optimal_token_baseline"): {
        "optimal_token_baseline, by place in the padded row": token_baseline("optimal_token_baseline")
    },
    ("advantage", "group_norm"): {"grpo_vectorized": advantage("grpo_vectorized")},
    ("advantage", "leave_one_out"): {"rloo_vectorized": advantage("rloo_vectorized")},
}
