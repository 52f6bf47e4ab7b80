"""This project's routers of mixtures of experts, called as functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.adapters.base import Case, leaf, slope
from conformance.adapters.packed import computes
from rft_algos.losses import routers
from rft_models.layers.moe_router import Router, chosen_experts, load_balancing_loss


def _matrix(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _router(case: Case) -> Router:
    return Router(len(case["inputs"]["logits"][0]), case["params"]["num_choices"], "bias" in case["inputs"])


def _biases(case: Case, dtype: torch.dtype) -> list[Tensor] | None:
    return [_matrix(case["inputs"]["bias"], dtype)] if "bias" in case["inputs"] else None


@computes("router", "load_balancing", "sigmoid_load_balancing")
def load_balancing(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The load-balancing loss of one layer."""
    logits_RE = leaf(_matrix(case["inputs"]["logits"], dtype))
    rows_R = torch.arange(len(logits_RE))
    loss = load_balancing_loss([logits_RE], rows_R, _router(case), biases=_biases(case, dtype)).share
    return {"loss": loss, "gradient": slope(loss, logits_RE).tolist()}


@computes("router", "biased_choice")
def biased_choice(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The experts of each row."""
    logits_RE = _matrix(case["inputs"]["logits"], dtype)
    experts_RK = chosen_experts(logits_RE, _router(case), _matrix(case["inputs"]["bias"], dtype))
    return {"chosen": torch.zeros_like(logits_RE).scatter(1, experts_RK, 1.0).tolist()}


@computes("router", "router_z_loss")
def router_z_loss(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The penalty on the normaliser."""
    logits_RE = leaf(_matrix(case["inputs"]["logits"], dtype))
    loss_R = routers.router_z_loss(logits_RE.logsumexp(-1))
    return {"loss": loss_R.tolist(), "gradient": slope(loss_R.mean(), logits_RE).tolist()}


@computes("router", "balanced_bias")
def balanced_bias(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The bias of the next step."""
    bias_LE, loads_LE = (_matrix(case["inputs"][name], dtype) for name in ("bias", "loads"))
    return {"bias": routers.balanced_bias(bias_LE, loads_LE, case["params"]["rate"]).tolist()}


@computes("router", "max_violation")
def max_violation(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """How far the busiest expert is above the mean."""
    return {"violation": routers.max_violation(_matrix(case["inputs"]["loads"], dtype)).tolist()}


@computes("router", "load_entropy")
def load_entropy(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """How evenly the experts are used."""
    return {"entropy": routers.load_entropy(_matrix(case["inputs"]["loads"], dtype)).tolist()}
