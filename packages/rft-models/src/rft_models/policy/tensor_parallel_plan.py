"""Tensor-parallel plan of a decoder: the matrices that are sharded over the ranks, and how.

transformers' configurations contain the plan (`base_model_tp_plan`); here it is read, compared with the layers that
this model has, and refused where ranks would compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import PreflightError
from rft_models.backbone.forward_check import Probe, require_equal_logits
from rft_models.files.divisibility import refuse_uneven
from rft_models.layers.eval_mode import eval_mode
from rft_models.logprobs.row_statistics import Collectives, VocabularyShard
from rft_models.lora.merge import ADAPTER, is_adapted
from rft_models.policy.causal_policy import CausalPolicy

_BY_OUTPUTS, _BY_INPUTS, _OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
_KNOWN = (_BY_OUTPUTS, _BY_INPUTS, _OF_HEADS)
_REPLICATED = "whole"
"""A factor of an adapter that every rank has."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Names of the sharded layers and parameters, in the order of the model."""

    by_outputs: tuple[str, ...]
    """Linear layers of which each rank computes a part of the outputs."""
    by_inputs: tuple[str, ...]
    """Linear layers that take such parts; their outputs are summed over the ranks."""
    of_heads: tuple[str, ...]
    """Parameters that are whole on every rank and see its heads alone: their gradients are parts of a sum."""
    vocabulary: tuple[str, ...]
    """The embedding, and the output layer where that is another matrix; none: they stay whole."""


def tensor_plan(policy: CausalPolicy, num_ranks: int) -> TensorPlan:
    """Return the plan that shards the model over `num_ranks` ranks.

    Raises:
        OptionsError: heads or columns do not divide.
        PreflightError: the architecture has layers that are not known to be cut, or drops out.
    """
    model = policy.model
    decoder = model.get_decoder()
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)
    config = model.config.get_text_config(decoder=True)
    refuse_uneven(config.to_dict(), num_ranks, policy.where)
    own = _kinds(decoder, getattr(decoder.config, "base_model_tp_plan", None) or {}, policy.where)
    kinds = dict(_with_adapters(decoder, own, policy.where))
    _refuse_others(decoder, kinds, num_ranks, policy.where)

    def names(kind: str) -> tuple[str, ...]:
        return tuple(prefix + name for name, its_kind in kinds.items() if its_kind == kind)

    of_heads = tuple(
        f"{prefix}{name}.{own}"
        for name, kind in kinds.items()
        if kind == _OF_HEADS
        for own, _ in decoder.get_submodule(name).named_parameters()
    )
    return TensorPlan(names(_BY_OUTPUTS), names(_BY_INPUTS), of_heads, _vocabulary(model))


def _kinds(decoder: nn.Module, plan: Mapping[str, str], where: str) -> Iterator[tuple[str, str]]:
    """(name of a layer, how it is cut) in the order of the model."""
    # in transformers' plans a star stands for the number of a layer
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): kind for pattern, kind in plan.items()}
    for name, module in decoder.named_modules():
        kind = next((kind for pattern, kind in patterns.items() if pattern.fullmatch(name)), None)
        if kind is None or isinstance(module, nn.Embedding):  # which is cut with the output matrix, or not at all
            continue
        if kind not in _KNOWN:
            raise _not_cut(f"{name} is cut as {kind!r}", where)
        yield name, kind


def _with_adapters(decoder: nn.Module, kinds: Iterable[tuple[str, str]], where: str) -> Iterator[tuple[str, str]]:
    """Extend the kinds by layers with an adapter y = W x + s B (A x), which is cut as the matrix W is.

    Where W is cut by its outputs, so is B, and every rank has A and all of A x. Where W is cut by its inputs, so is A,
    the parts of A x are summed over the ranks, and every rank has B. What every rank has, has its whole gradient there.
    """
    for name, kind in kinds:
        module: Any = decoder.get_submodule(name)
        if not is_adapted(module):
            yield name, kind
            continue
        if ADAPTER in module.lora_magnitude_vector:
            raise _not_cut(f"{name} has an adapter that scales rows of a matrix (dora)", where)
        by_outputs = kind == _BY_OUTPUTS
        yield f"{name}.base_layer", kind
        yield f"{name}.lora_A.{ADAPTER}", _REPLICATED if by_outputs else kind
        yield f"{name}.lora_B.{ADAPTER}", kind if by_outputs else _REPLICATED


def _refuse_others(decoder: nn.Module, kinds: Mapping[str, str], num_ranks: int, where: str) -> None:
    """Raise `PreflightError` unless every matrix of the layers is in the plan and a linear layer that divides."""
    if not kinds:
        raise _not_cut(f"{type(decoder).__name__} has no tensor-parallel plan", where)
    for name, module in decoder.named_modules():
        if _drops_out(module):
            raise _not_cut(f"{name or 'the decoder'} has dropout, which would differ between the ranks", where)
        kind = kinds.get(name)
        if kind in (_BY_OUTPUTS, _BY_INPUTS):
            if not isinstance(module, nn.Linear):
                raise _not_cut(f"{name} is a {type(module).__name__}", where)
            size = module.out_features if kind == _BY_OUTPUTS else module.in_features
            if size % num_ranks:
                raise _not_cut(f"{name} has {size} columns for {num_ranks} ranks", where)
        elif kind is None and name and not isinstance(module, nn.Embedding):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    raise _not_cut(f"{name}.{own} is a matrix that the plan does not name", where)


def _drops_out(module: nn.Module) -> bool:
    dropout: Any = getattr(module, "attention_dropout", None)
    return (isinstance(module, nn.Dropout) and module.p > 0) or (isinstance(dropout, float) and dropout > 0)


def _vocabulary(model: Any) -> tuple[str, ...]:
    """Return the layers with a row a token, where they are plain ones."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or not isinstance(head, nn.Linear):
        return ()
    names = {module: name for name, module in model.named_modules() if module is embedding or module is head}
    return names[embedding], names[head]


def _not_cut(what: str, where: str) -> PreflightError:
    return PreflightError(
        code="tensor.architecture",
        what=what,
        where=where,
        why="ranks must compute together what the whole model would: only heads and feed-forward columns are split",
        do="--tp_size 1 with --fsdp, which shards any architecture",
    )


def apply_tensor_parallel(
    policy: CausalPolicy, cut: Callable[[], object], collectives: Collectives, *, shares_head: bool
) -> None:
    """Cut a policy's model over ranks by `cut()`, and compare what it computes then with what it computed before.

    `shares_head`: the output matrix is cut by the vocabulary; the ranks meet through `collectives`.

    Raises:
        PreflightError: it computes something else.
    """
    before = probed(policy)  # while every rank still has the full model: the reference of the comparison
    cut()
    if shares_head:
        shard_output_head(policy, collectives)
    what = f"log-probabilities of {type(policy.model).__name__} in parts"
    require_equal_logits(before, probed(policy), of=what, dtype=policy.dtype, where=policy.where)


def shard_output_head(policy: CausalPolicy, collectives: Collectives) -> None:
    """Compute log-probabilities from this rank's rows of the output matrix and those of the others."""
    weight: Any = policy.head.layer.weight
    # each rank writes its number of rows into its own place, so that the sum is the table of all
    rows = torch.zeros(collectives.world_size, dtype=torch.int64, device=weight.device)
    rows[collectives.rank] = weight.to_local().shape[0]
    offset = int(collectives.sum(rows)[: collectives.rank].sum())
    policy.head = replace(policy.head, shard=VocabularyShard(offset, collectives))


@torch.no_grad()
def probed(policy: CausalPolicy) -> Tensor:
    config = policy.model.config.get_text_config(decoder=True)
    probe = Probe.of(int(config.vocab_size), policy.device)
    with eval_mode(policy.model):
        logprobs_T, _ = policy.token_logprobs(probe.tokens)
    return logprobs_T
