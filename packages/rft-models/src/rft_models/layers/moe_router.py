"""The load-balancing loss of mixtures of experts: how evenly routers spread tokens over experts.

Equations (4) to (6) of Switch Transformer (Fedus et al. 2021, arXiv 2101.03961), for k choices a token and pooled over
the layers, as Mixtral has it in transformers (`load_balancing_loss_func`). With E experts and R rows, a row being one
token in one layer,

    f_i = (1 / R) sum over rows of 1[expert i is among the row's k]        no gradient
    P_i = (1 / R) sum over rows of softmax(router logits)_i
    L   = E sum_i f_i P_i                                                   k where all experts are used alike

Rows are those that predict a token of the loss: of a shared prompt, the last one, once for each of its responses.
No padding, no other prompt token.

L is no sum over tokens, so a mean of the L of micro-batches is another number, which depends on the cut. Here f and R
are those of the whole optimizer step: they are counted over all micro-batches and ranks before the first backward
pass (a forward of the backbone without gradient). With them L is a sum over tokens, and the step is the same however
it is cut, except where two experts of a row are so close that rounding in the two forwards orders them differently.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_models.files.directories import checked_model_directory
from rft_models.files.transformers_config import hf_config
from rft_models.layers.eval_mode import eval_mode


@dataclass(frozen=True, slots=True)
class Router:
    """Settings that all routers of a model share."""

    num_experts: int
    num_choices: int
    """k: experts that a token goes to."""


@dataclass(frozen=True, slots=True)
class AuxLossShare:
    """A micro-batch's share of the auxiliary loss of a step."""

    share: Tensor
    """Scalar with gradient: parts of all micro-batches and ranks add up to L."""
    max_load: Tensor
    """Rows of the busiest expert over those of an even spread, in the whole step; 1 is even."""


def router_of(model_type: str, config: Mapping[str, Any], where: str) -> Router:
    """Read the router settings of a configuration.

    Raises:
        OptionsError: the architecture has no experts, or its own loss for them is not this one.
    """
    num_choices = config.get("num_experts_per_tok")
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if not num_choices or not num_experts or not _has_this_loss(model_type):
        raise OptionsError(
            code="router.none",
            what=f"model_type {model_type!r} has no routers with a known load-balancing loss",
            where=where,
            why="aux_loss_coef weights the routers' loss of mixtures of experts (mixtral, qwen2_moe, qwen3_moe, ...)",
            do="leave aux_loss_coef out",
        )
    return Router(int(num_experts), int(num_choices))


def router_facts(directory: str | Path) -> Router:
    """`router_of` a directory, without its weights."""
    path, stated = checked_model_directory(directory)
    config = hf_config(path)
    return router_of(stated["model_type"], config.get_text_config(decoder=True).to_dict(), str(path))


def count_experts(logits: Sequence[Tensor], rows_R: Tensor, router: Router) -> Tensor:
    """[E] float64: rows that go to each expert, over the layers; R k in all. No gradient.

    `logits` are [K, E] a layer, `rows_R` the rows of each that count, one of them perhaps several times.
    """
    counts_E = torch.zeros(router.num_experts, dtype=torch.float64, device=rows_R.device)
    for layer_KE in logits:
        chosen = layer_KE.detach().index_select(0, rows_R).float().topk(router.num_choices, dim=-1).indices
        counts_E += torch.bincount(chosen.flatten(), minlength=router.num_experts)
    return counts_E


def load_balancing_loss(
    logits: Sequence[Tensor], rows_R: Tensor, router: Router, counts_E: Tensor | None = None
) -> AuxLossShare:
    """E sum_i f_i (sum over these rows of p_i) / R, with f and R of `counts_E`, the counts of the whole step.

    None: these rows are the whole step.
    """
    # counts of the whole step make the loss a sum over tokens: the same however the step is split
    counts_E = count_experts(logits, rows_R, router) if counts_E is None else counts_E.to(rows_R.device, torch.float64)
    chosen = counts_E.sum().clamp(min=1.0)
    frequencies_E = router.num_choices * counts_E / chosen
    # f and R are constants of the step: autograd is left with one product a layer
    weights_E = (router.num_experts * router.num_choices / chosen * frequencies_E).float()
    share = torch.zeros((), device=rows_R.device)
    for layer_KE in logits:
        share = share + torch.softmax(layer_KE.float(), -1).index_select(0, rows_R).sum(0) @ weights_E
    return AuxLossShare(share, counts_E.max() * router.num_experts / chosen)


@torch.no_grad()
def verify_router(model: Any, router: Router, where: str) -> None:
    """Compare L with what the model itself computes of its routers' logits.

    Raises:
        PreflightError: they differ, or the model does not give its routers' logits.
    """
    # one sequence without a mask, of which the model's own loss counts every row too
    tokens = torch.arange(8, device=model.device)[None]
    with eval_mode(model):
        output = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    logits = [layer.flatten(0, -2) for layer in output.router_logits or ()]
    rows = torch.arange(8, device=model.device)
    computed = float(load_balancing_loss(logits, rows, router).share) if logits else float("nan")
    expected = float(output.aux_loss)
    # written so that NaN, which stands for absent logits, is refused too
    if not abs(computed - expected) <= 0.02 * expected:
        raise PreflightError(
            code="router.differs",
            what=f"the load-balancing loss of {type(model).__name__} is {expected:.4g}, but the one "
            f"computed here is {computed:.4g}",
            where=where,
            why="what is added to the loss must be the loss of the model's routers",
            do="leave aux_loss_coef out",
        )


def _has_this_loss(model_type: str) -> bool:
    """Return true where the architecture's module in transformers has the loss, a copy of Mixtral's."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return False
    package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
    try:
        module = importlib.import_module(f"{package}.modeling_{model_type}")
    except ImportError:
        return False
    return hasattr(module, "load_balancing_loss_func")
