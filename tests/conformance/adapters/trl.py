"""TRL: its formulas live inside methods of trainers, which are called on stand-ins that hold what they read.

Rollouts, rewards and log-probabilities that a trainer would make are handed to it; everything from
there to the advantages, the importance weights or the loss is TRL's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.rewards import get_soft_overlong_punishment

from conformance.adapters import trl_preferences
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
from conformance.adapters.trl_stand_ins import LOSS_TYPES, policy_loss, scored

PACKAGES = ("trl", "torch", "transformers")
NOT_APART = "inside _generate_and_score_completions, and not in its result by itself"
NO_CRITIC = "no trainer with a critic"
REFUSED: dict[Key, str] = {
    ("advantage", "gae"): NO_CRITIC,
    ("value", "squared_value_loss"): NO_CRITIC,
    ("value", "clipped_value_loss"): NO_CRITIC,
    ("value", "explained_variance"): NO_CRITIC,
    ("advantage", "gdpo"): "its result comes normalised over the batch: see gdpo_batch",
    ("preference", "orpo"): "the likelihood term is computed from logits in get_batch_loss_metrics",
    ("preference", "kto_reference_point"): "inside the loss: see kto",
    ("shaping", "cosine_length_reward"): "checks the answer's text itself before it scales",
    ("shaping", "kl_penalised"): NOT_APART,
    ("shaping", "truncated_keep"): NOT_APART,
    ("shaping", "combine"): NOT_APART,
}


def advantage(kind: Any, **fields: Any) -> Compute:
    """Advantages of sequences; TRL wants one size of group, in order."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs = case["inputs"]
        order, size = regular_groups(inputs["groups"])
        rows = inputs.get("components") or [[reward] for reward in inputs["rewards"]]
        components = torch.stack([numbers(rows[i], dtype) for i in order])
        more = {"reward_weights": numbers(inputs["weights"], dtype)} if "weights" in inputs else {}
        found = scored(kind, components, size, [[1]] * len(order), **fields, **more)["advantages"].tolist()
        return {"advantages": [found[order.index(i)] for i in range(len(order))]}

    return compute


def correction(mode: str) -> Compute:
    """The importance weights that the loss is multiplied with."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params, mask = case["inputs"], case["params"], case["inputs"]["mask"]
        old_BT = padded(inputs["old_logprobs"], dtype)
        found = scored(
            GRPOTrainer,
            torch.zeros(len(mask), 1, dtype=dtype),
            1,
            [[1] * len(row) for row in mask],
            tool_mask=mask,
            sampling_logps=inputs["behaviour_logprobs"],
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=params.get("low"),
            vllm_importance_sampling_clip_max=params.get("high", params.get("cap")),
            _get_per_token_logps_and_entropies=lambda *_, **__: (old_BT, None, None),
        )["importance_sampling_ratio"]
        return {"weights": at_mask(found.expand_as(old_BT), case)}

    return compute


def off_policy(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`get_off_policy_mask`, the current log-probs being those that the case calls old."""
    columns = [padded(case["inputs"][key], dtype) for key in ("old_logprobs", "behaviour_logprobs", "mask")]
    advantages = numbers([next(a for a in row if a is not None) for row in case["inputs"]["advantages"]], dtype)
    kept_B1 = GRPOTrainer.get_off_policy_mask(advantages[:, None], *columns, case["params"]["delta"])
    return {"weights": at_mask(kept_B1.expand_as(columns[0]), case)}


def surrogate(loss_type: str | None = None, kind: Any = GRPOTrainer, level: str = "token", **names: str) -> Compute:
    """A loss of GRPOTrainer or of one that extends it; `names` are settings and the parameters they take."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params = case["inputs"], case["params"]
        fields: dict[str, Any] = {key: params[name] for key, name in names.items() if params.get(name) is not None}
        if loss_type == "cispo":
            if params.get("clip_low") is not None:
                raise Unfit("no lower bound")
            fields["epsilon_high"] = 1.0 + params["clip_high"]  # TRL calls the bound itself epsilon
        if loss_type == "vespo":
            numbers_of = zip(("pos", "neg"), (params["positive"], params["negative"]), strict=True)
            fields |= {
                f"vespo_{key}_{side}": n
                for side, two in numbers_of
                for key, n in zip(("k", "lambda"), two, strict=True)
            }
        now_BT, mask_BT = leaf(padded(inputs["logprobs"], dtype)), padded(inputs["mask"], dtype)
        batch = {
            "completion_mask": mask_BT,
            "old_per_token_logps": padded(inputs["old_logprobs"], dtype),
            "advantages": padded(inputs["advantages"], dtype),
            "num_items_in_batch": mask_BT.sum(),
        }
        if kind is GMPOTrainer:
            rows = zip(inputs["advantages"], inputs["mask"], strict=True)
            firsts = [next((a for a, m in zip(row, marks, strict=True) if m), 0.0) for row, marks in rows]
            batch["advantages"] = numbers(firsts, dtype)
        if "extra" in inputs:
            batch["importance_sampling_ratio"] = padded(inputs["extra"], dtype)
        loss = policy_loss(
            now_BT,
            batch,
            kind,
            loss_type=loss_type or LOSS_TYPES[params["aggregation"]],
            importance_sampling_level=level,
            max_completion_length=params.get("max_tokens"),
            **fields,
        )
        return {"total": loss, "gradient": unpadded(slope(loss, now_BT), inputs["mask"])}

    return compute


CLIP = {"epsilon_low": "clip_low", "epsilon_high": "clip_high"}
GATES = {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"}


def divergence(corrected: bool = False) -> Compute:
    """The KL term, token by token: advantages are 0 and beta is 1."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, values, slopes = case["inputs"], [], []
        olds = inputs.get("old_logprobs", inputs["logprobs"])
        for now, reference, old in zip(inputs["logprobs"], inputs["reference_logprobs"], olds, strict=True):
            now_11 = leaf(padded([[now]], dtype))
            batch = {
                "completion_mask": torch.ones(1, 1, dtype=dtype),
                "old_per_token_logps": padded([[old]], dtype),
                "ref_per_token_logps": padded([[reference]], dtype),
                "advantages": torch.zeros(1, dtype=dtype),
            }
            loss = policy_loss(now_11, batch, loss_type="grpo", beta=1.0, use_bias_correction_kl=corrected)
            values.append(float(loss.detach()))
            slopes.append(float(slope(loss, now_11)))
        return {"value": values, "gradient": slopes}

    return compute


def aggregation(loss_type: str | None = None) -> Compute:
    """The losses of tokens are put in as negative advantages at the old policy."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        values, mask = case["inputs"]["values"], case["inputs"]["mask"]
        cuts = case["params"].get("cuts", [list(range(len(mask)))])
        if len({len(rows) for rows in cuts}) > 1:
            raise Unfit("micro-batches have one number of sequences")
        total, slopes = torch.zeros((), dtype=dtype), {}
        for rows in cuts:
            values_BT = leaf(padded([values[i] for i in rows], dtype))
            zeros_BT = torch.zeros_like(values_BT)
            batch = {
                "completion_mask": padded([mask[i] for i in rows], dtype),
                "old_per_token_logps": zeros_BT,
                "advantages": -values_BT,
                "num_items_in_batch": torch.tensor(sum(map(sum, mask)), dtype=dtype),
            }
            loss = policy_loss(
                zeros_BT,
                batch,
                parts=len(cuts),
                loss_type=loss_type or LOSS_TYPES[case["name"]],
                max_completion_length=case["params"].get("max_tokens"),
            )
            slopes |= dict(zip(rows, unpadded(slope(loss, values_BT), [mask[i] for i in rows]), strict=True))
            total = total + loss.detach()
        return {"total": total, "gradient": [slopes[i] for i in range(len(mask))]}

    return compute


def overlong(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`get_soft_overlong_punishment`, whose factor is 1."""
    params = case["params"]
    if params["factor"] != 1.0:
        raise Unfit("the full penalty is 1")
    punish = get_soft_overlong_punishment(params["max_length"], params["buffer"])
    return {"rewards": [float(p) for p in punish(completion_ids=[[1] * n for n in case["inputs"]["lengths"]])]}


COMPUTE: dict[Key, Compute] = {
    ("advantage", "group_norm"): advantage(GRPOTrainer),
    ("advantage", "group_centred"): advantage(GRPOTrainer, scale_rewards="none"),
    ("advantage", "batch_std"): advantage(GRPOTrainer, scale_rewards="batch"),
    ("advantage", "gdpo_batch"): advantage(GRPOTrainer, multi_objective_aggregation="normalize_then_sum"),
    ("advantage", "leave_one_out"): advantage(RLOOTrainer),
    ("surrogate", "ppo_clip"): surrogate(**CLIP),
    ("surrogate", "decoupled_ppo"): surrogate(**CLIP),
    ("surrogate", "dual_clip"): surrogate(**CLIP, delta="dual"),
    ("surrogate", "two_sided"): surrogate(**CLIP, delta="delta"),
    ("surrogate", "cispo"): surrogate("cispo"),
    ("surrogate", "sapo"): surrogate("sapo", **GATES),
    ("surrogate", "vespo"): surrogate("vespo"),
    ("surrogate", "gspo"): surrogate(level="sequence", **CLIP),
    ("surrogate", "gmpo"): surrogate("grpo", kind=GMPOTrainer, **CLIP),
    ("kl", "k3"): divergence(),
    ("kl", "unbiased_k3"): divergence(corrected=True),
    ("correction", "truncate_tokens"): correction("token_truncate"),
    ("correction", "truncate_sequences"): correction("sequence_truncate"),
    ("correction", "mask_tokens"): correction("token_mask"),
    ("correction", "mask_sequences"): correction("sequence_mask"),
    ("correction", "off_policy_sequence_mask"): off_policy,
    **{("aggregation", name): aggregation() for name in LOSS_TYPES},
    **trl_preferences.COMPUTE,
    ("shaping", "soft_overlong_penalty"): overlong,
}
ALSO: dict[Key, dict[str, Compute]] = {("aggregation", "token_mean"): {"loss_type='bnpo'": aggregation("bnpo")}}
