"""Experts of a layer that several ranks hold together: rows go to the ranks of their experts, and come back.

With S ranks and E experts, rank r holds experts r E / S to (r + 1) E / S - 1. A rank sends each of its rows once for
each expert that the router chose, runs its own experts on what it gets, and weighs what comes back:

    y_t = sum over the chosen i of w_ti f_i(x_t)

as on one rank. The weights w stay where the row is; rows alone travel.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft_core.errors import PreflightError
from rft_models.backbone.forward_check import require_equal_logits
from rft_models.files.divisibility import refuse_uneven_experts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.tensor_parallel_plan import probed


class ExpertRanks(Protocol):
    """The ranks that hold the experts of a layer together."""

    @property
    def world_size(self) -> int: ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the rows, those for rank 0 first, so many to each; return those that came, so many from each."""
        ...


def expert_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of what holds the experts of a layer, all in one tensor a matrix (`[E, ...]`)."""
    for name, module in model.named_modules():
        # what transformers' decorator of such modules leaves there (`use_experts_implementation`)
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "_apply_gate"):
            yield name, module


def divide_experts(policy: CausalPolicy, ranks: ExpertRanks, divide: Callable[[Sequence[str]], None]) -> None:
    """Run every expert of a policy on the rank that holds it, and compare what it computes with what it computed.

    Args:
        policy: a mixture of experts, the same on every rank.
        ranks: those that hold its experts together; all of them call this.
        divide: leaves this rank its experts of the named parameters.

    Raises:
        OptionsError: the experts do not divide, or there are none.
        PreflightError: they are held in another way than is known here, or something else is computed.
    """
    layers = list(expert_layers(policy.model))
    _refuse_other_counts(policy, ranks.world_size)
    names = [f"{path}.{own}" for path, layer in layers for own, _ in _own_parameters(path, layer, policy.where)]
    if not names:
        raise _not_divided(f"{type(policy.model).__name__} does not hold its experts in one tensor", policy.where)
    # a model that has them checks its routers in a forward of its own: here, where all ranks make it
    _ = policy.has_known_routers
    before = probed(policy)  # while every rank still has all experts: the reference of the comparison
    divide(names)
    for _, layer in layers:
        layer.num_experts //= ranks.world_size
        layer.forward = types.MethodType(_OnRanks(ranks), layer)
    what = f"log-probabilities of {type(policy.model).__name__} with divided experts"
    require_equal_logits(before, probed(policy), of=what, dtype=policy.dtype, where=policy.where)


class _OnRanks:
    """Forward of a layer's experts over the ranks that hold them."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = ranks

    def __call__(self, layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D] states, [T, k] experts, [T, k] weights -> [T, D]."""
        num_tokens, num_choices = top_k_index.shape
        num_ranks, num_here = self._ranks.world_size, layer.num_experts
        order_N = top_k_index.reshape(-1).argsort(stable=True)
        counts_E = torch.bincount(top_k_index.reshape(-1), minlength=num_ranks * num_here)
        # row r of what comes: how many rows rank r has for each expert here
        ones = [1] * num_ranks
        arriving_SE = self._ranks.exchange(counts_E.view(num_ranks, num_here), ones, ones)
        sent, received = torch.stack([counts_E.view(num_ranks, num_here).sum(1), arriving_SE.sum(1)]).tolist()
        rows_ND = self._ranks.exchange(hidden_states[order_N // num_choices], sent, received)
        own = torch.arange(num_here, device=rows_ND.device).repeat(num_ranks)
        own_N = own.repeat_interleave(arriving_SE.flatten(), output_size=rows_ND.shape[0])
        results_ND = self._ranks.exchange(_run_here(layer, rows_ND, own_N), received, sent)
        # back in the order of the tokens; a permutation, so that no two rows are added here
        place_N = torch.empty_like(order_N).index_copy_(0, order_N, torch.arange(len(order_N), device=own.device))
        weighed = results_ND[place_N] * top_k_weights.reshape(-1, 1)
        return weighed.view(num_tokens, num_choices, -1).sum(1).to(hidden_states.dtype)


def _run_here(layer: Any, rows_ND: Tensor, experts_N: Tensor) -> Tensor:
    """Run this rank's experts on rows, each of which goes to one of them."""
    tensors = {name: parameter.to_local() for name, parameter in layer.named_parameters(recurse=False)}
    if not rows_ND.shape[0]:
        # nothing of a matrix is added: the graph is that of the other ranks, whose exchanges this one then joins
        return rows_ND + sum(each.flatten()[:0].sum() for each in tensors.values())
    ones_N1 = torch.ones_like(experts_N[:, None], dtype=rows_ND.dtype)
    return type(layer).forward(_Local(layer, tensors), rows_ND, experts_N[:, None], ones_N1)


class _Local:
    """A layer of experts as its class's forward sees it, with this rank's parts in the place of its parameters."""

    def __init__(self, layer: Any, tensors: dict[str, Tensor]) -> None:
        self._layer = layer
        self.__dict__.update(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _refuse_other_counts(policy: CausalPolicy, num_ranks: int) -> None:
    """Raise OptionsError or PreflightError unless all layers have equally many experts, and those divide."""
    sizes = sorted({int(layer.num_experts) for _, layer in expert_layers(policy.model)})
    if len(sizes) > 1:
        raise _not_divided(f"layers of {type(policy.model).__name__} have {sizes} experts", policy.where)
    refuse_uneven_experts(sizes[0] if sizes else 0, num_ranks, policy.where)


def _own_parameters(path: str, layer: Any, where: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in layer.named_parameters():
        if "." in name or parameter.shape[0] != layer.num_experts:
            raise _not_divided(f"{path}.{name} is no tensor of one part an expert", where)
        yield name, parameter


def _not_divided(what: str, where: str) -> PreflightError:
    return PreflightError(
        code="expert.architecture",
        what=what,
        where=where,
        why="ranks must compute together what the whole model would: only experts that lie in one tensor are divided",
        do="--ep_size 1 with --fsdp, which shards any architecture",
    )
