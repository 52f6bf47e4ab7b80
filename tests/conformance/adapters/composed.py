"""This project's equations as a run calls them: an algorithm, `compute_advantages` over the batch, `policy_loss`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, Compute, Key, leaf, numbers, slope
from conformance.adapters.packed import layout, packed, unpacked
from rft_algos.algorithms import components
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.objectives import RolloutBatch, compute_advantages, policy_loss

COMPUTE: dict[Key, Compute] = {}
REFUSED: dict[Key, str] = {}
OF_SEQUENCES = {
    "group_norm": components.GroupNorm,
    "group_centred": components.GroupCentred,
    "batch_std": components.BatchStd,
    "leave_one_out": components.LeaveOneOut,
    "max_rl": components.MaxRl,
    "opo": components.Opo,
    "pass_at_k": components.PassAtK,
    "best_of_group": components.BestOfGroup,
    "gpg": components.Gpg,
    "cpgd": components.CpgdWeighted,
    "remax": components.ReMax,
    "reinforce_pp_baseline": components.GroupCentred,
}
CORRECTIONS = {
    "truncate_tokens": components.TokenTis,
    "truncate_sequences": components.SequenceTis,
    "mask_tokens": components.TokenMis,
    "mask_sequences": components.SequenceMis,
    "mask_sequences_geometric": components.GeometricMis,
}
KL_WORDS: dict[str, Any] = {"absolute": "abs", "straight_through": "k3+"}
BOUNDS = {"clip_low": "low", "clip_high": "high", "limit_low": "low", "limit_high": "high"}


def vespo(positive: tuple[float, float], negative: tuple[float, float]) -> components.Vespo:
    """The component, which has a field a number."""
    return components.Vespo(
        k_positive=positive[0], lambda_positive=positive[1], k_negative=negative[0], lambda_negative=negative[1]
    )


SURROGATES: dict[str, Any] = {
    "ppo_clip": components.PpoClip,
    "dual_clip": components.DualClip,
    "cispo": components.Cispo,
    "sapo": components.Sapo,
    "gspo": components.Gspo,
    "gspo_token": components.GspoToken,
    "gmpo": components.Gmpo,
    "cpgd": components.CpgdClip,
    "dppo_tv": lambda **options: components.Dppo(divergence="tv", **options),
    "dppo_kl": lambda **options: components.Dppo(divergence="kl", **options),
    "clip_cov": components.ClipCov,
    "kl_cov": components.KlCov,
    "reinforce": components.Reinforce,
    "importance_weighted": components.ImportanceWeighted,
    "dro": components.Dro,
    "dro_sequence": components.DroSequence,
    "vespo": vespo,
    "topr": components.Topr,
    "decoupled_ppo": components.PpoClip,
}


def batch(case: Case, dtype: torch.dtype, **more: Any) -> RolloutBatch:
    """Rollouts with the case's mask, one token a sequence where it has none."""
    inputs = case["inputs"]
    count = next(len(inputs[key]) for key in ("rewards", "groups", "mask") if key in inputs)
    mask = inputs.get("mask", [[1] * length for length in inputs.get("lengths", [1] * count)])
    mask_T, ids_T = layout({"inputs": {"mask": mask}})
    zeros_T = torch.zeros(mask_T.shape, dtype=dtype)
    fields: dict[str, Any] = {
        "rewards_N": numbers(inputs.get("rewards", [0.0] * count), dtype),
        "group_ids_N": torch.tensor(inputs.get("groups", list(range(count)))),
        "loss_mask_T": mask_T,
        "segment_ids_T": ids_T,
        "old_logprobs_T": zeros_T,
        "behaviour_logprobs_T": zeros_T,
    }
    return RolloutBatch(**(fields | more))


def advantage(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Advantages of sequences, read off their tokens."""
    inputs, params, name = case["inputs"], dict(case["params"]), case["name"]
    whitened = name == "reinforce_pp_baseline"
    options = {} if whitened else params
    if options.get("epsilon") == 0.0:
        options = {**options, "epsilon": 1e-300}  # a record wants a positive one
    record = PolicyAlgorithm(advantage=OF_SEQUENCES[name](**options), normalise_advantages=whitened)
    more = {"greedy_rewards_N": numbers(inputs["greedy_rewards"], dtype)} if "greedy_rewards" in inputs else {}
    rollouts = batch(case, dtype, **more)
    found_T = compute_advantages(record, rollouts).advantages_T
    if "mask" in inputs:
        return {"advantages": unpacked(found_T, inputs["mask"])}
    firsts = [int((rollouts.segment_ids_T == i).nonzero()[0]) for i in range(len(inputs["rewards"]))]
    return {"advantages": found_T[firsts].tolist()}


def over_time(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Returns and GAE: the case's rewards of tokens enter as a k1 penalty against a reference, as those of a run do."""
    inputs, params, name, mask = case["inputs"], case["params"], case["name"], case["inputs"]["mask"]
    choice: Any = components.Gae(gamma=params["gamma"], lambd=params["lambda"]) if name == "gae" else None
    record = PolicyAlgorithm(
        advantage=choice or components.Returns(gamma=params["gamma"]),
        kl_estimator="k1",
        kl_place="reward",
        kl_coef=1.0,
        normalise_advantages=name == "reinforce_pp",
    )
    more = {"reference_logprobs_T": packed(inputs["token_rewards"], dtype)}
    more |= {"values_T": packed(inputs["values"], dtype)} if "values" in inputs else {}
    found = compute_advantages(record, batch(case, dtype, **more))
    if name != "gae":
        key = "returns" if name == "discounted_returns" else "advantages"
        return {key: unpacked(found.advantages_T, mask)}
    assert found.returns_T is not None
    return {"advantages": unpacked(found.advantages_T, mask), "returns": unpacked(found.returns_T, mask)}


def gdpo(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The parts of the rewards, each normalised by itself, and the whole."""
    inputs, over_batch = case["inputs"], case["name"] == "gdpo_batch"
    record = PolicyAlgorithm(
        advantage=components.Gdpo(epsilon=case["params"]["epsilon"] or 1e-300, over_batch=over_batch)
    )
    columns = {
        "components_NK": torch.stack([numbers(row, dtype) for row in inputs["components"]]),
        "component_weights_K": numbers(inputs["weights"], dtype),
    }
    rollouts = batch(case, dtype, **columns)
    firsts = [int((rollouts.segment_ids_T == i).nonzero()[0]) for i in range(len(inputs["components"]))]
    return {"advantages": compute_advantages(record, rollouts).advantages_T[firsts].tolist()}


def process(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rewards of steps."""
    inputs, epsilon = case["inputs"], case["params"]["epsilon"] or 1e-300
    record = PolicyAlgorithm(advantage=components.ProcessGroupNorm(epsilon=epsilon))
    columns = {
        "step_rewards_T": packed(inputs["step_rewards"], dtype),
        "step_mask_T": packed(inputs["step_mask"], torch.bool),
    }
    return {
        "advantages": unpacked(compute_advantages(record, batch(case, dtype, **columns)).advantages_T, inputs["mask"])
    }


def correction(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Weights of tokens."""
    inputs = case["inputs"]
    columns = {f"{key}_T": packed(inputs[key], dtype) for key in ("old_logprobs", "behaviour_logprobs")}
    record = PolicyAlgorithm(correction=CORRECTIONS[case["name"]](**case["params"]))
    found_T = compute_advantages(record, batch(case, dtype, **columns)).weights_T
    assert found_T is not None
    mask_T, _ = layout(case)
    return {"weights": unpacked(torch.where(mask_T, found_T, 0.0), inputs["mask"])}


def loss_of(case: Case, dtype: torch.dtype, record: PolicyAlgorithm, **more: Tensor | None) -> tuple[Tensor, Tensor]:
    """`policy_loss` of the whole case as one micro-batch, and its gradient."""
    inputs, mask = case["inputs"], case["inputs"]["mask"]
    mask_T, ids_T = layout(case)
    variable_T = leaf(packed(inputs["logprobs"], dtype))
    found = policy_loss(
        record,
        logprobs_T=variable_T,
        old_logprobs_T=packed(inputs["old_logprobs"], dtype),
        advantages_T=packed(inputs["advantages"], dtype),
        loss_mask_T=mask_T,
        segment_ids_T=ids_T,
        entropy_T=None,
        num_loss_tokens=sum(map(sum, mask)),
        num_sequences=sum(1 for row in mask if sum(row)),
        **({"reference_logprobs_T": None} | more),
    )
    return found.loss, slope(found.loss, variable_T)


def surrogate(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The aggregated loss and its gradient."""
    params, name = dict(case["params"]), case["name"]
    aggregation = params.pop("aggregation")
    params.pop("max_ratio", None)  # 20 everywhere, which is the function's own default
    choice = SURROGATES[name](**{BOUNDS.get(key, key): value for key, value in params.items()})
    extra = packed(case["inputs"]["extra"], dtype) if "extra" in case["inputs"] else None
    more: dict[str, Tensor | None] = {}
    if name in ("clip_cov", "kl_cov"):
        assert extra is not None
        more["selected_T"] = extra == 1
    elif extra is not None:
        more["token_weights_T"] = extra
    total, slopes = loss_of(case, dtype, PolicyAlgorithm(surrogate=choice, aggregation=aggregation), **more)
    return {"total": total, "gradient": unpacked(slopes, case["inputs"]["mask"])}


def divergence(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The KL term of the loss, whose gradient is that of the estimates over the number of tokens."""
    inputs = case["inputs"]
    count = len(inputs["logprobs"])
    record = PolicyAlgorithm(kl_estimator=KL_WORDS.get(case["name"], case["name"]), kl_place="loss", kl_coef=1.0)
    olds = inputs.get("old_logprobs", inputs["logprobs"])
    rows = {"logprobs": [inputs["logprobs"]], "old_logprobs": [olds], "advantages": [[0.0] * count]}
    given = {"inputs": {**rows, "mask": [[1] * count]}, "params": {}}
    _, slopes = loss_of(given, dtype, record, reference_logprobs_T=numbers(inputs["reference_logprobs"], dtype))
    return {"gradient": (slopes * count).tolist()}


COMPUTE |= {("advantage", name): advantage for name in OF_SEQUENCES}
COMPUTE |= {("advantage", name): over_time for name in ("discounted_returns", "gae", "reinforce_pp")}
COMPUTE |= {("advantage", name): gdpo for name in ("gdpo", "gdpo_batch")}
COMPUTE |= {("advantage", "process_group_norm"): process}
COMPUTE |= {("correction", name): correction for name in CORRECTIONS}
COMPUTE |= {("surrogate", name): surrogate for name in SURROGATES}
COMPUTE |= {("kl", name): divergence for name in ("k1", "k2", "k3", *KL_WORDS, "unbiased_k3", "importance_weighted_k1")}
