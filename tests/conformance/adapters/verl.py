"""verl: `verl.trainer.ppo.core_algos` and `rollout_corr_helper`, called as they are; run in verl's own environment."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from conformance.adapters import verl_rewards
from conformance.adapters.base import Case, Compute, Key, at_mask, leaf, numbers, padded, slope, unpadded

PACKAGES = ("verl", "torch", "tensordict")
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
NO_PREFERENCES = "trains by reinforcement and supervision alone"
ENDLESS = 1e30
"""A second clip that nothing reaches, where the case has none."""
INSIDE = "computed inside the loss, which draws or ranks the micro-batch's own tokens"
REFUSED: dict[Key, str] = {
    ("surrogate", "clip_cov"): INSIDE,
    ("surrogate", "kl_cov"): INSIDE,
    ("surrogate", "kl_cov_selection"): INSIDE,
    ("advantage", "gdpo"): "its result comes whitened: see gdpo_batch",
    **{
        ("preference", name): NO_PREFERENCES
        for name in (
            *("bradley_terry", "hps", "log_exp", "dpo", "ipo", "ipo_per_token"),
            *("orpo", "simpo", "kto", "kto_reference_point", "rao_kupper_tie", "step_cross_entropy"),
            *("hinge", "robust_dpo", "exo", "nca", "bco", "sppo", "aot_paired", "aot_unpaired"),
            *("apo_zero", "apo_down", "discopop"),
        )
    },
}


# surrogates


def config(case: Case, **more: Any) -> ActorConfig:
    """An actor's settings with the case's bounds."""
    params = case["params"]
    low, high = params.get("clip_low", params.get("limit_low")), params.get("clip_high", params.get("limit_high"))
    bounds = {} if high is None else {"clip_ratio": high, "clip_ratio_low": 1.0 if low is None else low}
    bounds |= {} if high is None else {"clip_ratio_high": high}
    taus = {"tau_pos": params.get("tau_positive", 1.0), "tau_neg": params.get("tau_negative", 1.05)}
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_torch_compile=False, **bounds, **taus, **more
    )


def surrogate(name: str, **fixed: str) -> Compute:
    """A policy loss of `core_algos`; `fixed` names settings by the parameters that they take."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params = case["inputs"], case["params"]
        options: dict[str, Any] = {key: params.get(value, ENDLESS) for key, value in fixed.items()}
        if name == "dro":
            options = {"policy_loss": PolicyLossConfig(loss_mode="dro", dro_beta=params["tau"])}
        variable_BT = leaf(padded(inputs["logprobs"], dtype))
        old_BT, advantages_BT = (padded(inputs[key], dtype) for key in ("old_logprobs", "advantages"))
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=old_BT,
            log_prob=variable_BT,
            advantages=advantages_BT,
            response_mask=padded(inputs["mask"], dtype),
            loss_agg_mode=AGGREGATIONS[params["aggregation"]],
            config=config(case, **options),
            rollout_is_weights=padded(inputs["extra"], dtype) if "extra" in inputs else None,
        )
        return {"total": loss, "gradient": unpadded(slope(loss, variable_BT), inputs["mask"])}

    return compute


# divergences, corrections, aggregations, critics


def divergence(penalty: str) -> Compute:
    """An estimator of `kl_penalty`."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        now = leaf(numbers(case["inputs"]["logprobs"], dtype))
        found = core_algos.kl_penalty(now, numbers(case["inputs"]["reference_logprobs"], dtype), penalty)
        return {"value": found.tolist(), "gradient": slope(found, now).tolist()}

    return compute


def correction(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Weights of `rollout_corr_helper`, and its rejection where the case keeps sequences or drops them."""
    inputs, params, name = case["inputs"], case["params"], case["name"]
    log_rho_BT = padded(inputs["old_logprobs"], dtype) - padded(inputs["behaviour_logprobs"], dtype)
    mask_BT = padded(inputs["mask"], dtype)
    band = f"{params['low']}_{params['high']}" if "low" in params else params["cap"]
    found_BT = mask_BT
    if "geometric" in name:
        found_BT, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_rho_BT, mask_BT, "seq_mean_k1", band)
        band = 1e9
    if name != "mask_sequences_geometric":
        level = "sequence" if name.endswith("_sequences") else "token"
        weights_BT, _ = rollout_corr_helper.compute_rollout_correction_weights(log_rho_BT, mask_BT, level, band)
        found_BT = found_BT * weights_BT
    return {"weights": at_mask(found_BT, case)}


def aggregation(with_length: bool = True) -> Compute:
    """`agg_loss`, added up over micro-batches with the counts of the step."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        values, mask = case["inputs"]["values"], case["inputs"]["mask"]
        total, slopes = torch.zeros((), dtype=dtype), {}
        for rows in case["params"].get("cuts", [list(range(len(mask)))]):
            values_BT = leaf(padded([values[i] for i in rows], dtype))
            loss = core_algos.agg_loss(
                values_BT,
                padded([mask[i] for i in rows], dtype),
                AGGREGATIONS[case["name"]],
                batch_num_tokens=sum(map(sum, mask)),
                global_batch_size=sum(1 for row in mask if sum(row)),
                loss_scale_factor=case["params"].get("max_tokens") if with_length else None,
            )
            slopes |= dict(zip(rows, unpadded(slope(loss, values_BT), [mask[i] for i in rows]), strict=True))
            total = total + loss.detach()
        return {"total": total, "gradient": [slopes[i] for i in range(len(mask))]}

    return compute


def critic(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`compute_value_loss`; a width of 1e9 stands for no clip."""
    inputs = case["inputs"]
    values_BT = leaf(padded(inputs["values"], dtype))
    columns = {"returns": padded(inputs["returns"], dtype), "values": padded(inputs["old_values"], dtype)}
    width = case["params"].get("clip", 1e9)
    loss, _ = core_algos.compute_value_loss(
        vpreds=values_BT, response_mask=padded(inputs["mask"], dtype), cliprange_value=width, **columns
    )
    return {"total": loss, "gradient": unpadded(slope(loss, values_BT), inputs["mask"])}


COMPUTE: dict[Key, Compute] = {
    **verl_rewards.COMPUTE,
    ("surrogate", "ppo_clip"): surrogate("vanilla", clip_ratio_c="dual"),
    ("surrogate", "decoupled_ppo"): surrogate("vanilla", clip_ratio_c="dual"),
    ("surrogate", "dual_clip"): surrogate("vanilla", clip_ratio_c="dual"),
    ("surrogate", "two_sided"): surrogate("vanilla", clip_ratio_c="delta"),
    ("surrogate", "cispo"): surrogate("cispo"),
    ("surrogate", "sapo"): surrogate("sapo"),
    ("surrogate", "gspo"): surrogate("gspo"),
    ("surrogate", "gspo_token"): surrogate("gspo"),
    ("surrogate", "gmpo"): surrogate("geo_mean"),
    ("surrogate", "dppo_tv"): surrogate("dppo_tv", clip_ratio_c="max_ratio"),
    ("surrogate", "dppo_kl"): surrogate("dppo_kl", clip_ratio_c="max_ratio"),
    ("surrogate", "reinforce"): surrogate("gpg"),
    ("surrogate", "dro"): surrogate("dro"),
    ("kl", "k1"): divergence("k1"),
    ("kl", "k2"): divergence("k2"),
    ("kl", "k3"): divergence("k3"),
    ("kl", "absolute"): divergence("abs"),
    ("kl", "straight_through"): divergence("k3+"),
    ("correction", "truncate_tokens"): correction,
    ("correction", "truncate_sequences"): correction,
    ("correction", "mask_tokens"): correction,
    ("correction", "mask_sequences"): correction,
    ("correction", "mask_sequences_geometric"): correction,
    ("correction", "masked_geometric_with_ratios"): correction,
    **{("aggregation", name): aggregation() for name in AGGREGATIONS},
    ("value", "squared_value_loss"): critic,
    ("value", "clipped_value_loss"): critic,
}
ALSO: dict[Key, dict[str, Compute]] = {
    **verl_rewards.ALSO,
    ("aggregation", "fixed_length"): {"without loss_scale_factor, its default": aggregation(with_length=False)},
    ("surrogate", "ppo_clip"): {"with clip_ratio_c at its default": surrogate("vanilla")},
    ("surrogate", "dppo_tv"): {"with clip_ratio_c at its default": surrogate("dppo_tv")},
    ("surrogate", "dppo_kl"): {"with clip_ratio_c at its default": surrogate("dppo_kl")},
}
