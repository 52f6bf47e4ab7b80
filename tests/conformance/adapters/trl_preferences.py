"""TRL's losses of pairs and of labelled responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer

from conformance.adapters.base import Case, Compute, Key, Unfit, leaf, numbers, padded, slope
from conformance.adapters.trl_stand_ins import trainer


def outputs(logprobs_BT: Tensor) -> Any:
    """What a forward pass with the fused head gives."""
    zeros_BT = torch.zeros_like(logprobs_BT)
    fields = {"entropy": zeros_BT, "mean_logits": zeros_BT, "is_top1": zeros_BT > 1}
    return lambda **_: SimpleNamespace(log_probs=logprobs_BT, **fields)


def responses(logprobs: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs with all of a response's at its first token, and [B, 1 + T] the mask with one prompt token."""
    rows = [torch.cat([one[None], one.new_zeros(max(lengths) - 1)]) for one in logprobs]
    return torch.stack(rows), padded([[0, *[1] * length] for length in lengths], torch.int64)


def dpo(loss_type: str) -> Compute:
    """`DPOTrainer._compute_loss` with log-probs of the reference computed before."""

    def compute(case: Case, dtype: torch.dtype) -> dict[str, Any]:
        inputs, params = case["inputs"], case["params"]
        if loss_type == "sigmoid" and params.get("label_smoothing"):
            raise Unfit("the sigmoid loss has no label smoothing; 'robust' is another one")
        both = [leaf(numbers(inputs[key], dtype)) for key in ("chosen", "rejected")]
        lengths = [
            *inputs.get("chosen_lengths", [1] * len(both[0])),
            *inputs.get("rejected_lengths", [1] * len(both[0])),
        ]
        logprobs_BT, mask_BT = responses(torch.cat(both), lengths)
        stand_in = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=params["beta"],
            label_smoothing=params.get("label_smoothing", params.get("label_noise", 0.0)),
            args=SimpleNamespace(discopop_tau=params.get("temperature", 0.0)),
            use_weighting=False,
        )
        batch = {
            "input_ids": torch.ones_like(mask_BT),
            "attention_mask": torch.ones_like(mask_BT),
            "completion_mask": mask_BT,
            "ref_chosen_logps": numbers(inputs["reference_chosen"], dtype),
            "ref_rejected_logps": numbers(inputs["reference_rejected"], dtype),
        }
        return of_pairs(DPOTrainer._compute_loss(stand_in, outputs(logprobs_BT), batch, False), both)

    return compute


def of_pairs(loss: Tensor, both: list[Tensor]) -> dict[str, Any]:
    """The mean loss and its gradients."""
    slopes = [slope(loss, side).tolist() for side in both]
    return {"total": loss} | dict(zip(("gradient_chosen", "gradient_rejected"), slopes, strict=True))


def bradley_terry(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`RewardTrainer.compute_loss`."""
    inputs = case["inputs"]
    both = [leaf(numbers(inputs[key], dtype)) for key in ("chosen", "rejected")]
    scores = torch.cat(both)[:, None]
    batch = {"attention_mask": torch.ones(len(scores), 1)}
    batch |= {"margin": numbers(inputs["margin"], dtype)} if "margin" in inputs else {}
    stand_in = trainer(args=SimpleNamespace(center_rewards_coefficient=None))
    model: Any = lambda **_: SimpleNamespace(logits=scores)  # noqa: E731
    return of_pairs(RewardTrainer.compute_loss(stand_in, model, batch), both)


def simpo(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`CPOTrainer.cpo_loss`, which is handed log-probs per token."""
    inputs, params = case["inputs"], case["params"]
    both = [leaf(numbers(inputs[key], dtype)) for key in ("chosen", "rejected")]
    stand_in = trainer(
        alpha=0.0, loss_type="simpo", simpo_gamma=params["gamma"], beta=params["beta"], label_smoothing=0.0
    )
    means = [
        side / numbers(inputs[key], dtype)
        for side, key in zip(both, ("chosen_lengths", "rejected_lengths"), strict=True)
    ]
    losses, _, _ = CPOTrainer.cpo_loss(stand_in, *means)
    return {"loss": losses.tolist()} | of_pairs(losses.mean(), both)


def kto(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """`KTOTrainer._compute_loss`; mismatched responses are handed over as their log-probs."""
    inputs, params = case["inputs"], case["params"]
    now = leaf(numbers(inputs["logprobs"], dtype))
    logprobs_BT, mask_BT = responses(now, [2] * len(now))
    mismatched = numbers(inputs["mismatched"], dtype)
    stand_in = trainer(
        _compute_kl_logps=lambda *_: mismatched,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=params["beta"],
        desirable_weight=params["desirable_weight"],
        undesirable_weight=params["undesirable_weight"],
    )
    batch = {
        "input_ids": torch.ones_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "label": numbers(inputs["labels"], torch.bool),
        "ref_logps": numbers(inputs["reference_logprobs"], dtype),
        "ref_KL_logps": numbers(inputs["reference_mismatched"], dtype),
    }
    loss = KTOTrainer._compute_loss(stand_in, outputs(logprobs_BT), batch, False)
    return {"total": loss, "gradient": slope(loss, now).tolist()}


COMPUTE: dict[Key, Compute] = {
    ("preference", "bradley_terry"): bradley_terry,
    ("preference", "dpo"): dpo("sigmoid"),
    ("preference", "ipo"): dpo("ipo"),
    ("preference", "ipo_per_token"): dpo("ipo"),
    **{
        ("preference", name): dpo(loss_type)
        for name, loss_type in (
            ("hinge", "hinge"),
            ("robust_dpo", "robust"),
            ("exo", "exo_pair"),
            ("nca", "nca_pair"),
            ("bco", "bco_pair"),
            ("sppo", "sppo_hard"),
            ("aot_paired", "aot"),
            ("aot_unpaired", "aot_unpaired"),
            ("apo_zero", "apo_zero"),
            ("apo_down", "apo_down"),
            ("discopop", "discopop"),
        )
    },
    ("preference", "simpo"): simpo,
    ("preference", "kto"): kto,
}
