"""This project's surrogates, divergences, corrections, aggregations, critics and preferences, called as functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, leaf, numbers, slope
from conformance.adapters.packed import computes, layout, packed, unpacked, weights
from rft_algos import surrogates
from rft_algos.losses import aggregation as reductions
from rft_algos.losses import kl, off_policy, preference, preference_variants, step_labels, value

# surrogates

BY_RATIO = ("ppo_clip", "dual_clip", "two_sided", "sapo", "importance_weighted")
BY_SEQUENCE = ("gspo", "gspo_token", "gmpo")
BY_SEQUENCE_AND_LOGPROB = ("dro_sequence", "vespo", "topr")
BY_LOGPROB = ("cpgd", "dppo_tv", "dppo_kl")
_NOT_OPTIONS = ("aggregation", "num_sequences")


@computes(
    "surrogate",
    *BY_RATIO,
    *BY_SEQUENCE,
    *BY_LOGPROB,
    *BY_SEQUENCE_AND_LOGPROB,
    *(
        "cispo",
        "clip_cov",
        "decoupled_ppo",
        "dppo_top_k",
        "dro",
        "kl_cov",
        "policy_drift",
        "reinforce",
        "squared_log_ratio",
    ),
)
def surrogate(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of tokens, aggregated, and the gradient."""
    inputs, mask = case["inputs"], case["inputs"]["mask"]
    mask_T, ids_T = layout(case)
    variable_T = leaf(packed(inputs["logprobs"], dtype))
    # what stands at masked tokens must not reach an equation that takes no mask: the caller puts 0 there
    columns = {key: torch.where(mask_T, packed(inputs[key], dtype), 0.0) for key in ("old_logprobs", "advantages")}
    now_T = torch.where(mask_T, variable_T, 0.0)
    extra_T = torch.where(mask_T, packed(inputs["extra"], dtype), 0.0) if "extra" in inputs else None
    losses_T = torch.where(mask_T, _losses(case, now_T, columns, extra_T, mask_T, ids_T), 0.0)
    weights_T = weights(case["params"]["aggregation"], case, dtype)
    total = reductions.weighted_sum(weights_T, losses_T)
    rows = {"loss": losses_T, "gradient": slope(total, variable_T)}
    return {"total": total} | {key: unpacked(found, mask) for key, found in rows.items()}


def _losses(
    case: Case, now_T: Tensor, columns: dict[str, Tensor], extra_T: Tensor | None, mask_T: Tensor, ids_T: Tensor
) -> Tensor:
    name = case["name"]
    old_T, advantages_T = columns["old_logprobs"], columns["advantages"]
    options = {key: v for key, v in case["params"].items() if key not in _NOT_OPTIONS}
    function, log_ratio_T = getattr(surrogates, name), now_T - old_T
    if name in BY_RATIO:
        return function(log_ratio_T, advantages_T, **options)
    if name in BY_SEQUENCE:
        return function(log_ratio_T, advantages_T, mask_T, ids_T, **options)
    if name in BY_SEQUENCE_AND_LOGPROB:
        return function(now_T, log_ratio_T, advantages_T, mask_T, ids_T, **options)
    if name == "dppo_top_k":
        return function(now_T, old_T, advantages_T, extra_T, **options)
    if name in BY_LOGPROB:
        return function(now_T, old_T, advantages_T, **options)
    if name in ("policy_drift", "squared_log_ratio"):
        return function(log_ratio_T, **options)
    if name in ("clip_cov", "kl_cov"):
        assert extra_T is not None
        return function(log_ratio_T, advantages_T, extra_T.bool(), **options)
    if name == "decoupled_ppo":
        return function(log_ratio_T, advantages_T, extra_T, **options)
    if name == "reinforce":
        return function(now_T, advantages_T)
    return function(now_T, log_ratio_T, advantages_T, **options)


@computes("surrogate", "kl_cov_selection")
def kl_cov_selection(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Covariances and the largest of them."""
    inputs, mask = case["inputs"], case["inputs"]["mask"]
    mask_T, _ = layout(case)
    columns = (packed(inputs[key], dtype) for key in ("logprobs", "advantages"))
    found_T = surrogates.token_covariances(*columns, mask_T)
    marks_T = surrogates.select_kl_cov(found_T, mask_T, fraction=case["params"]["fraction"])
    return {"covariances": unpacked(found_T, mask), "selected": unpacked(marks_T.to(dtype), mask)}


@computes("surrogate", "top_k_divergence")
def top_k_divergence(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Divergences of tokens; the epsilon is the function's own."""
    columns = [
        torch.stack([numbers(row, dtype) for row in case["inputs"][key]]) for key in ("old_logprobs", "logprobs")
    ]
    found_T = surrogates.top_k_divergence(*columns, divergence=case["params"]["divergence"])
    return {"divergence": found_T.tolist()}


# divergences, corrections, aggregations


@computes("kl", "k1", "k2", "k3", "absolute", "straight_through", "unbiased_k3", "importance_weighted_k1")
def divergence(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Estimates of tokens and their gradients."""
    inputs, name = case["inputs"], case["name"]
    now_T = leaf(numbers(inputs["logprobs"], dtype))
    log_ratio_T = now_T - numbers(inputs["reference_logprobs"], dtype)
    if name == "straight_through":
        found_T = kl.straight_through(kl.k3(log_ratio_T), kl.k2(log_ratio_T))
    elif name in ("unbiased_k3", "importance_weighted_k1"):
        found_T = getattr(kl, name)(log_ratio_T, now_T - numbers(inputs["old_logprobs"], dtype))
    else:
        found_T = getattr(kl, name)(log_ratio_T)
    return {"value": found_T.tolist(), "gradient": slope(found_T, now_T).tolist()}


@computes(
    "correction",
    "truncate_tokens",
    "truncate_sequences",
    "mask_tokens",
    "mask_sequences",
    "mask_sequences_geometric",
    "masked_geometric_with_ratios",
    "veto_outliers",
    "off_policy_sequence_mask",
)
def correction(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Weights of tokens."""
    inputs, params, name = case["inputs"], case["params"], case["name"]
    mask_T, ids_T = layout(case)
    log_rho_T = packed(inputs["old_logprobs"], dtype) - packed(inputs["behaviour_logprobs"], dtype)
    if name == "off_policy_sequence_mask":
        advantages_T = packed(inputs["advantages"], dtype)
        found_T = off_policy.off_policy_sequence_mask(-log_rho_T, advantages_T, mask_T, ids_T, **params)
    elif name == "masked_geometric_with_ratios":
        found_T = off_policy.mask_sequences_geometric(log_rho_T, mask_T, ids_T, **params)
        found_T = found_T * off_policy.truncate_tokens(torch.where(mask_T, log_rho_T, 0.0), cap=torch.inf)
    elif name in ("truncate_tokens", "mask_tokens"):
        # these two know no mask: 0 stands where masked, before and after
        found_T = getattr(off_policy, name)(torch.where(mask_T, log_rho_T, 0.0), **params)
        found_T = torch.where(mask_T, found_T, 0.0)
    else:
        found_T = getattr(off_policy, name)(log_rho_T, mask_T, ids_T, **params)
    return {"weights": unpacked(found_T, inputs["mask"])}


@computes("aggregation", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")
@computes("aggregation", "token_sum", "prompt_mean_token_mean")
def aggregation(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The loss of a step, added up over micro-batches, and the weight of every token in it."""
    values, mask = case["inputs"]["values"], case["inputs"]["mask"]
    everything = [list(range(len(values)))]
    total, slopes = torch.zeros((), dtype=dtype), {}
    for rows in case["params"].get("cuts", everything):
        part = [values[i] for i in rows]
        values_T = leaf(packed(part, dtype))
        loss = reductions.weighted_sum(weights(case["name"], case, dtype, rows), values_T)
        slopes |= dict(zip(rows, unpacked(slope(loss, values_T), part), strict=True))
        total = total + loss.detach()
    return {"total": total, "gradient": [slopes[i] for i in range(len(mask))]}


# critics and preferences


@computes("value", "squared_value_loss", "clipped_value_loss", "huber_value_loss")
def critic(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of values."""
    inputs, mask = case["inputs"], case["inputs"]["mask"]
    mask_T, _ = layout(case)
    variable_T = leaf(packed(inputs["values"], dtype))
    # the caller puts 0 at masked tokens, as for surrogates
    columns = (variable_T, *(packed(inputs[key], dtype) for key in ("old_values", "returns")))
    values_T, old_T, returns_T = (torch.where(mask_T, column_T, 0.0) for column_T in columns)
    if case["name"] == "clipped_value_loss":
        losses_T = value.clipped_value_loss(values_T, old_T, returns_T, case["params"]["clip"])
    elif case["name"] == "huber_value_loss":
        losses_T = value.huber_value_loss(values_T, returns_T, case["params"]["delta"])
    else:
        losses_T = value.squared_value_loss(values_T, returns_T)
    total = reductions.weighted_sum(weights("token_mean", case, dtype), losses_T)
    rows = {"loss": torch.where(mask_T, losses_T, 0.0), "gradient": slope(total, variable_T)}
    return {"total": total} | {key: unpacked(found, mask) for key, found in rows.items()}


@computes("value", "explained_variance")
def explained_variance(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """How much of the returns' variance is explained."""
    values_T, returns_T = (packed(case["inputs"][key], dtype) for key in ("values", "returns"))
    mask_T, ids_T = layout(case)
    parts = [torch.isin(ids_T, torch.tensor(rows)) for rows in case["params"].get("cuts", [ids_T.unique().tolist()])]
    moments, *others = [value.value_moments(values_T[p_T], returns_T[p_T], mask_T[p_T]) for p_T in parts]
    for other in others:
        moments = moments.merge(other)
    found = value.explained_variance(moments)
    assert found is not None
    return {"explained": found}


@computes(
    "preference", "bradley_terry", "hps", "log_exp", "rao_kupper_tie", "dpo", "ipo", "ipo_per_token", "orpo", "simpo"
)
def pairs(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of pairs."""
    inputs, name = case["inputs"], case["name"]
    both = [leaf(numbers(inputs[key], dtype)) for key in ("chosen", "rejected")]
    more: list[Tensor] = []
    if name in ("dpo", "ipo", "ipo_per_token"):
        more += [numbers(inputs[key], dtype) for key in ("reference_chosen", "reference_rejected")]
    if name in ("ipo_per_token", "orpo", "simpo"):
        more += [numbers(inputs[key], dtype) for key in ("chosen_lengths", "rejected_lengths")]
    if name == "bradley_terry" and "margin" in inputs:
        more += [numbers(inputs["margin"], dtype)]
    losses = getattr(preference, name)(*both, *more, **case["params"])
    slopes = [slope(losses.mean(), side).tolist() for side in both]
    named = dict(zip(("gradient_chosen", "gradient_rejected"), slopes, strict=True))
    return {"loss": losses.tolist(), "total": losses.mean()} | named


@computes(
    "preference",
    *("hinge", "robust_dpo", "exo", "nca", "bco", "sppo", "aot_paired", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop"),
)
def pairs_of_variants(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of pairs with their reference in one record."""
    both = [leaf(numbers(case["inputs"][key], dtype)) for key in ("chosen", "rejected")]
    reference = [numbers(case["inputs"][key], dtype) for key in ("reference_chosen", "reference_rejected")]
    losses = getattr(preference_variants, case["name"])(preference_variants.Pairs(*both, *reference), **case["params"])
    slopes = [slope(losses.mean(), side).tolist() for side in both]
    named = dict(zip(("gradient_chosen", "gradient_rejected"), slopes, strict=True))
    return {"loss": losses.tolist(), "total": losses.mean()} | named


def reference_point(case: Case, dtype: torch.dtype) -> Tensor:
    """KTO's reference point."""
    policy, reference = (numbers(case["inputs"][key], dtype) for key in ("mismatched", "reference_mismatched"))
    return preference.kto_reference_point((policy - reference).sum(), len(policy))


@computes("preference", "step_cross_entropy")
def labelled_steps(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of labelled steps."""
    now = leaf(numbers(case["inputs"]["scores"], dtype))
    losses = step_labels.step_cross_entropy(now, numbers(case["inputs"]["labels"], dtype))
    return {"loss": losses.tolist(), "total": losses.mean(), "gradient": slope(losses.mean(), now).tolist()}


@computes("preference", "kto_reference_point")
def kto_reference_point(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """KTO's reference point."""
    return {"point": reference_point(case, dtype)}


@computes("preference", "kto")
def kto(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Losses of labelled responses."""
    inputs = case["inputs"]
    now = leaf(numbers(inputs["logprobs"], dtype))
    columns = (numbers(inputs["reference_logprobs"], dtype), numbers(inputs["labels"], torch.bool))
    losses = preference.kto(now, *columns, reference_point(case, dtype), **case["params"])
    return {"loss": losses.tolist(), "total": losses.mean(), "gradient": slope(losses.mean(), now).tolist()}
