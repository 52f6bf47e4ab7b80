"""Tensor parallel: neighbouring ranks hold a part of each matrix, and compute one forward and backward together.

Matrices that make heads or the feed-forward's columns are cut by their outputs, those that bring them together again
by their inputs, through torch's DTensor plans (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3): two sums
over the group a layer forward, two backward. The embedding and the output matrix are cut by the vocabulary. What is
left (norms) every rank holds whole, with the same gradient; gains of single heads see this rank's heads alone, and
their gradients are summed over the group.

Bytes of a rank for P parameters over S ranks, float32 AdamW: about 16 P / S. Data-parallel groups hold the same and
sum their gradients once a step.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as CutBy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from rft_dist.collectives import Collectives
from rft_dist.planning.memory_estimate import BUCKET_BYTES
from rft_dist.strategies.data_parallel import verify_equal_weights, weights_of
from rft_dist.strategies.dtensor_shards import ShardedWeights, start_of
from rft_dist.strategies.fsdp import ShardedOptimizer
from rft_dist.strategies.optimizer import AdamWOptions
from rft_dist.strategies.process_groups import DataParallelRanks, MeshGroup, TensorGroup
from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext, TensorPlan, narrow_dtype


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Cut a model's matrices over groups of ranks, and make the optimizer of this rank's parts."""
    first_rows = model.release_trained_rows()
    group = TensorGroup(context.collectives, context.settings.tp_size, context.device)
    plan = cut_matrices(model, group)
    optimizer = None
    if context.adam is not None:
        optimizer = TensorParallelOptimizer(
            model.trainable_parameters(),
            group,
            of_heads=plan.of_heads,
            **context.adamw_options(model, master=narrow_dtype(context.settings) is not None, first_rows=first_rows),
        )
    return DistributedModel(
        data=DataParallelRanks(context.collectives, group),
        weights=weights_of(model, context, optimizer),
        optimizer=optimizer,
    )


def cut_matrices(model: ShardableModel, group: TensorGroup) -> TensorPlan:
    """Cut a model's matrices over the group, and return the plan that says how."""

    def cut(plan: TensorPlan) -> None:
        TensorParallelModel(model.module, plan, group)

    return model.enable_tensor_parallel(group, cut)


class TensorParallelModel(ShardedWeights):
    """A module whose matrices are cut over a group of ranks, in place.

    Example::

        cut = TensorParallelModel(model, plan, TensorGroup(ranks, 2, device))
        loss = model(tokens).sum()                            # called by all ranks of the group, with the same tokens
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, group: TensorGroup) -> None:
        """Every rank must hold the same weights; afterwards no more than its own stay in memory.

        Raises:
            PeerError: the weights differ between the ranks.
        """
        super().__init__(model.named_parameters, group.everyone.rank)
        self.model = model
        # `src_data_rank=None` below sends nothing: each rank cuts its own copy, so the copies must be equal
        verify_equal_weights(model.named_parameters(), group.everyone)
        styles: dict[str, Any] = {name: ColwiseParallel() for name in plan.by_outputs}
        styles |= {name: RowwiseParallel() for name in plan.by_inputs}
        parallelize_module(model, group.mesh, styles, src_data_rank=None)
        _cut_vocabulary(model, plan.vocabulary, group)
        keep_own_memory(model)


def _cut_vocabulary(model: nn.Module, names: Sequence[str], group: TensorGroup) -> None:
    """Cut the vocabulary matrices by rows; a tied matrix stays tied. The first layer named is the embedding."""
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for number, name in enumerate(names):
        layer = model.get_submodule(name)
        for key, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in cut:
                parts = distribute_tensor(parameter.detach(), group.mesh, [CutBy(0)], src_data_rank=None)
                cut[parameter] = nn.Parameter(parts, requires_grad=parameter.requires_grad)
            layer.register_parameter(key, cut[parameter])
        if number == 0:
            assert type(layer) is nn.Embedding, f"{name} is a {type(layer).__name__}"
            layer.forward = types.MethodType(_Lookup(group), layer)


class _Lookup:
    """Embedding lookup in a row-sharded matrix: each rank returns the rows that it holds, the sum is all of them."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(self, layer: nn.Embedding, token_ids: Tensor) -> Tensor:
        weight = layer.weight
        assert isinstance(weight, DTensor)
        rows_VD, first = weight.to_local(), start_of(weight)[0]
        here = (token_ids >= first) & (token_ids < first + rows_VD.shape[0])
        # ids of other ranks look up row 0 here, and the last line masks them out
        rows = F.embedding(torch.where(here, token_ids - first, 0), rows_VD) if rows_VD.shape[0] else None
        if rows is None:  # fewer rows than ranks: the last ones hold nothing
            rows = rows_VD.new_zeros((*token_ids.shape, rows_VD.shape[1]))
        if layer.padding_idx is not None:  # whose row has no gradient from here
            padding = (token_ids == layer.padding_idx)[..., None]
            rows = torch.where(padding, rows.detach(), rows)
        return self._group.merge(torch.where(here[..., None], rows, 0.0))


def keep_own_memory(model: nn.Module) -> None:
    """Release the full matrices of which a rank's part is a view, by copying the part."""
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                own = parameter.to_local()
                if own.untyped_storage().nbytes() > own.numel() * own.element_size() or not own.is_contiguous():
                    parameter._local_tensor = own.clone(memory_format=torch.contiguous_format)


class TensorParallelOptimizer(ShardedOptimizer):
    """AdamW over parts: each rank steps on what it holds, with the norm of the whole gradient.

    Gradients are summed over the data-parallel copies once a step, after the last micro-batch. What is whole on every
    rank has one sum over all ranks, so that it has the same bits on all of them. All ranks of a group call `backward`
    equally often, other groups as often as they need.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: MeshGroup,
        *,
        of_heads: Collection[str] = (),
        **options: Unpack[AdamWOptions],
    ) -> None:
        """`of_heads` as in `TensorPlan`, the others as in `ShardedOptimizer`.

        With `master`, gradients of fewer bits than float32 are added up in it, micro-batch after micro-batch.
        """
        super().__init__(named_parameters, group.everyone, **options)
        self._group, self._of_heads = group, frozenset(of_heads)
        self._sums: dict[str, Tensor] = {}
        if options.get("master"):
            for name, parameter in self._parameters.items():
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.register_post_accumulate_grad_hook(self._taking(name))

    def _summed_gradients(self) -> dict[str, Tensor]:
        self._sum_over_ranks()
        gradients = super()._summed_gradients()
        self._sums = {}
        return gradients

    def _taking(self, name: str) -> Any:
        def take(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            own = self._own(name, gradient).float()
            self._sums[name] = self._sums[name].add_(own) if name in self._sums else own

        return take

    def _gradient(self, name: str) -> Tensor:
        if name not in self._sums:
            self._sums[name] = super()._gradient(name)
        return self._sums[name]

    def _sum_over_ranks(self) -> None:
        cut, full = list[Tensor](), list[Tensor]()
        for name, parameter in self._parameters.items():
            gradient = self._gradient(name)
            if isinstance(parameter, DTensor):
                cut.append(gradient)
                continue
            full.append(self._share(name, gradient))
        for flat, parts in buckets(cut):
            self._group.sum_over_copies(flat)
            unflatten_buckets(flat, parts)
        for flat, parts in buckets(full):
            self.everyone.sum_in_place(flat)
            unflatten_buckets(flat, parts)

    def _share(self, name: str, gradient: Tensor) -> Tensor:
        """Return what this rank adds to the sum over all ranks, of a parameter that is whole on every rank."""
        # the same on all ranks of a group, so that each gives its share; gains of heads are parts of a sum
        return gradient if name in self._of_heads else gradient.div_(self._group.size)

    @property
    def everyone(self) -> Collectives:
        """The collectives of all ranks."""
        return self._group.everyone


def buckets(gradients: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield (flat copy, its tensors), at most `BUCKET_BYTES` or one tensor each, in float32 at least."""
    waiting = [gradient for gradient in gradients if gradient.numel()]
    while waiting:
        dtype = torch.float64 if waiting[0].dtype is torch.float64 else torch.float32
        parts, num_bytes = list[Tensor](), 0
        while waiting and waiting[0].dtype == (parts or waiting)[0].dtype:
            num_bytes += waiting[0].numel() * dtype.itemsize
            if parts and num_bytes > BUCKET_BYTES:
                break
            parts.append(waiting.pop(0))
        yield torch.cat([part.to(dtype).reshape(-1) for part in parts]), parts


def unflatten_buckets(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy the pieces of a flat tensor back into the tensors that it was made of."""
    for part, piece in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(piece.view(part.shape))
