"""The load-balancing loss of mixtures of experts, and what else their routers say of a step.

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

Families that score experts by a sigmoid (`SIGMOID_FAMILIES`) choose by sigmoid(logits) + bias, and P_i is the mean of
sigmoid(logits)_i / sum_j sigmoid(logits)_j (DeepSeek-V3, arXiv 2412.19437, equation 18, over the step in place of a
sequence). Their bias is a buffer, in no gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
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
    by_sigmoid: bool = False
    """Experts are scored by a sigmoid each, and chosen with a bias; else by a softmax over all."""


SIGMOID_FAMILIES = frozenset({"dots1"})
"""By `model_type`: their routers choose by sigmoid scores with a bias, in one group."""
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class AuxLossShare:
    """A micro-batch's share of the auxiliary loss of a step, and its routers' numbers for others."""

    share: Tensor
    """Scalar with gradient: parts of all micro-batches and ranks add up to L."""
    max_load: Tensor
    """Rows of the busiest expert over those of an even spread, in the whole step; 1 is even."""
    log_normaliser_LR: Tensor
    """[L, R] log sum_i exp(logits_i) of each row in each layer, with gradient."""
    loads_LE: Tensor
    """[L, E] float64: rows of this micro-batch that go to each expert of each layer."""
    max_logit: Tensor
    """The largest size of a router's logit in these rows."""


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Loads and sizes of logits of a forward's routers, in the rows that count, without gradient."""

    log_normaliser_LR: Tensor
    """[L, R] log sum_i exp(logits_i) of each row in each layer."""
    loads_LE: Tensor
    """[L, E] float64: rows that go to each expert of each layer."""
    max_logit: Tensor
    """The largest size of a router's logit in these rows."""


def router_of(model_type: str, config: Mapping[str, Any], where: str) -> Router:
    """Read the router settings of a configuration.

    Raises:
        OptionsError: the architecture has no experts, or its own loss for them is not this one.
    """
    num_choices = config.get("num_experts_per_tok")
    num_experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    # chosen groups first are another choice than one of all experts
    by_sigmoid = model_type in SIGMOID_FAMILIES and config.get("n_group") == 1
    if not num_choices or not num_experts or not (by_sigmoid or _has_this_loss(model_type)):
        raise OptionsError(
            code="router.none",
            what=f"model_type {model_type!r} has no routers with a known load-balancing loss",
            where=where,
            why="aux_loss_coef weights the routers' loss of mixtures of experts (mixtral, qwen2_moe, qwen3_moe, ...)",
            do="leave aux_loss_coef out",
        )
    return Router(int(num_experts), int(num_choices), by_sigmoid)


def router_facts(directory: str | Path) -> Router:
    """`router_of` a directory, without its weights."""
    path, stated = checked_model_directory(directory)
    config = hf_config(path)
    return router_of(stated["model_type"], config.get_text_config(decoder=True).to_dict(), str(path))


def gates_of(model: Any) -> list[Any]:
    """Return the modules that give the routers' logits, in the order of the layers; none in a dense model."""
    return gates_in(model.get_decoder())


def gates_in(decoder: Any) -> list[Any]:
    """Return the routers' modules of a decoder, as `gates_of`."""
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    return [] if kind is None else [module for module in decoder.modules() if isinstance(module, kind)]


def compute_gates_in_float32(decoder: Any) -> None:
    """Let the routers compute in the type of their weights where autocast rounds all other products.

    Two experts whose logits are close change places under a rounding, and a token then goes to another one; routers
    are a small share of the products (Fedus et al. 2021, arXiv 2101.03961, section 2.4, "selective precision").
    """
    for gate in gates_in(decoder):
        if getattr(gate.__dict__.get("forward"), "__func__", None) is not _without_autocast:
            gate.own_forward = gate.__dict__.get("forward")
            # a method, which a deep copy of the model binds to the copy
            gate.forward = MethodType(_without_autocast, gate)


def _without_autocast(gate: Any, hidden_states: Tensor) -> Any:
    hidden_states = hidden_states.to(gate.weight.dtype)
    with torch.autocast(hidden_states.device.type, enabled=False):
        # a patch of this one module stands before the forward of its class
        return type(gate).forward(gate, hidden_states) if gate.own_forward is None else gate.own_forward(hidden_states)


def biases_of(gates: Sequence[Any]) -> list[Tensor]:
    """Return the [E] bias of each router, in place; none where they have none."""
    return [getattr(gate, _BIAS) for gate in gates if getattr(gate, _BIAS, None) is not None]


def chosen_experts(logits_RE: Tensor, router: Router, bias_E: Tensor | None = None) -> Tensor:
    """[R, k] int64: the experts that rows go to, by their logits [R, E]."""
    scores_RE = logits_RE.detach().float()
    if router.by_sigmoid:
        scores_RE = scores_RE.sigmoid()
    return (scores_RE if bias_E is None else scores_RE + bias_E).topk(router.num_choices, dim=-1).indices


def chosen_routes(logits: Sequence[Tensor], router: Router, biases: Sequence[Tensor] | None = None) -> Tensor:
    """[L, R, k] int64: the experts that rows go to in each layer, by their logits [R, E], in ascending order."""
    chosen = [chosen_experts(one, router, biases[layer] if biases else None) for layer, one in enumerate(logits)]
    return torch.stack(chosen).sort(-1).values


def expert_loads(
    logits: Sequence[Tensor], rows_R: Tensor, router: Router, biases: Sequence[Tensor] | None = None
) -> Tensor:
    """[L, E] float64: rows that go to each expert of each layer; R k in each. No gradient.

    `logits` are [K, E] a layer, `rows_R` the rows of each that count, one of them perhaps several times.
    """
    loads: list[Tensor] = []
    for layer, logits_KE in enumerate(logits):
        bias_E = biases[layer] if biases else None
        logits_RE = logits_KE.detach().index_select(0, rows_R)
        chosen_RK = chosen_experts(logits_RE, router, bias_E)
        # not `bincount`, which waits for the device to say how long its result is
        marks_RE = torch.zeros(logits_RE.shape, dtype=torch.bool, device=logits_RE.device).scatter_(1, chosen_RK, True)
        loads.append(marks_RE.sum(0).double())
    return torch.stack(loads)


@torch.no_grad()
def routed_rows(
    logits: Sequence[Tensor], rows_R: Tensor, router: Router, biases: Sequence[Tensor] | None = None
) -> RoutedRows:
    """Read what `expert_loads` reads, and the size of the logits, with no wait for the device."""
    log_normalisers: list[Tensor] = []
    max_logit = torch.zeros((), device=rows_R.device)
    for layer_KE in logits:
        rows_RE = _at_least_float32(layer_KE.index_select(0, rows_R))
        log_normalisers.append(rows_RE.logsumexp(-1))
        if rows_R.numel():
            max_logit = torch.maximum(max_logit, rows_RE.abs().amax().float())
    return RoutedRows(torch.stack(log_normalisers), expert_loads(logits, rows_R, router, biases), max_logit)


def count_experts(
    logits: Sequence[Tensor], rows_R: Tensor, router: Router, biases: Sequence[Tensor] | None = None
) -> Tensor:
    """[E] float64: `expert_loads` over the layers."""
    return expert_loads(logits, rows_R, router, biases).sum(0)


def load_balancing_loss(
    logits: Sequence[Tensor],
    rows_R: Tensor,
    router: Router,
    counts_E: Tensor | None = None,
    biases: Sequence[Tensor] | None = None,
) -> AuxLossShare:
    """E sum_i f_i (sum over these rows of p_i) / R, with f and R of `counts_E`, the counts of the whole step.

    None: these rows are the whole step.
    """
    loads_LE = expert_loads(logits, rows_R, router, biases)
    # counts of the whole step make the loss a sum over tokens: the same however the step is split
    counts_E = loads_LE.sum(0) if counts_E is None else counts_E.to(rows_R.device, torch.float64)
    chosen = counts_E.sum().clamp(min=1.0)
    frequencies_E = router.num_choices * counts_E / chosen
    # f and R are constants of the step: autograd is left with one product a layer
    weights_E = router.num_experts * router.num_choices / chosen * frequencies_E
    share, max_logit = (torch.zeros((), device=rows_R.device) for _ in range(2))
    log_normalisers: list[Tensor] = []
    for layer_KE in logits:
        sums_E = _probabilities(_at_least_float32(layer_KE), router).index_select(0, rows_R).sum(0)
        share = share + sums_E @ weights_E.to(sums_E.dtype)
        rows_RE = _at_least_float32(layer_KE.index_select(0, rows_R))
        log_normalisers.append(rows_RE.logsumexp(-1))
        if rows_R.numel():
            max_logit = torch.maximum(max_logit, rows_RE.detach().abs().amax().float())
    return AuxLossShare(
        share, counts_E.max() * router.num_experts / chosen, torch.stack(log_normalisers), loads_LE, max_logit
    )


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _probabilities(logits_KE: Tensor, router: Router) -> Tensor:
    if not router.by_sigmoid:
        return torch.softmax(logits_KE, -1)
    scores_KE = logits_KE.sigmoid()
    return scores_KE / scores_KE.sum(-1, keepdim=True)


@torch.no_grad()
def verify_router(model: Any, router: Router, where: str) -> None:
    """Compare L with what the model itself computes of its routers' logits; of sigmoids, the experts that it chooses.

    Raises:
        PreflightError: they differ, or the model does not give its routers' logits.
    """
    # one sequence without a mask, of which the model's own loss counts every row too
    tokens = torch.arange(8, device=model.device)[None]
    if router.by_sigmoid:
        return _verify_choices(model, router, tokens, where)
    with eval_mode(model):
        output = model(input_ids=tokens, use_cache=False, output_router_logits=True)
    logits = [layer.flatten(0, -2) for layer in output.router_logits or ()]
    rows = torch.arange(8, device=model.device)
    computed = float(load_balancing_loss(logits, rows, router).share) if logits else float("nan")
    expected = float(output.aux_loss)
    # written so that NaN, which stands for absent logits, is refused too
    if not abs(computed - expected) <= 0.02 * expected:
        what = f"the load-balancing loss of {type(model).__name__} is {expected:.4g}, but the one computed here is"
        raise _differs(f"{what} {computed:.4g}", where)


def _verify_choices(model: Any, router: Router, tokens: Tensor, where: str) -> None:
    """Compare the experts that the routers of a model choose with those of `chosen_experts`."""
    given: list[tuple[Any, ...]] = []
    gates = gates_of(model)
    hooks = [gate.register_forward_hook(lambda _, __, output: given.append(output)) for gate in gates]
    try:
        with eval_mode(model):
            model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for (logits_RE, _, expected_RK), bias_E in zip(given, biases_of(gates), strict=True):
        chosen_RK = chosen_experts(logits_RE, router, bias_E)
        if not torch.equal(chosen_RK.sort(-1).values, expected_RK.sort(-1).values):
            raise _differs(f"{type(model).__name__} chooses other experts than those computed here", where)


def _differs(what: str, where: str) -> PreflightError:
    return PreflightError(
        code="router.differs",
        what=what,
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
