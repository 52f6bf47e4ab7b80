"""Tensor parallel combined with FSDP2: each part of a matrix is sharded over the ranks that hold the same part.

The ranks are a grid of two dimensions, "data" by "tensor". A row of it computes together (`TensorParallelModel`, which
comes first); down a column FSDP2 cuts what each rank would hold into blocks, gathers a layer while it computes, and
sums gradients (`FullyShardedModel` on `TensorGroup.data_mesh`). Bytes of a rank for P parameters, float32 AdamW:
16 P / (data x tensor), and the gathered layer's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Unpack

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft_dist.strategies.data_parallel import weights_of
from rft_dist.strategies.fsdp import ShardedOptimizer, shard_weights
from rft_dist.strategies.optimizer import AdamWOptions
from rft_dist.strategies.process_groups import DataParallelRanks, TensorGroup
from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext
from rft_dist.strategies.tensor_parallel import buckets, cut_matrices, unflatten_buckets


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Cut a model's matrices over groups of ranks, and shard each part over the ranks that hold the same one."""
    first_rows = model.release_trained_rows()
    group = TensorGroup(context.collectives, context.settings.tp_size, context.device)
    plan = cut_matrices(model, group)
    shard_weights(model, context, group.data_mesh)
    optimizer = None
    if context.adam is not None:
        optimizer = TensorShardedOptimizer(
            model.trainable_parameters(),
            group,
            of_heads=plan.of_heads,
            **context.adamw_options(model, first_rows=first_rows),
        )
    return DistributedModel(
        data=DataParallelRanks(context.collectives, group),
        weights=weights_of(model, context, optimizer),
        optimizer=optimizer,
    )


class TensorShardedOptimizer(ShardedOptimizer):
    """AdamW over blocks of parts: each rank steps on what it holds, with the norm of the whole gradient.

    Gradients arrive summed down the columns of the grid. Of what no rank of a row holds a part of (norms), each rank
    of the row has the gradient; their mean is taken, so that it has the same bits on all of them. Gains of heads see
    a rank's heads alone: their gradients are summed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: TensorGroup,
        *,
        of_heads: Collection[str] = (),
        **options: Unpack[AdamWOptions],
    ) -> None:
        """`of_heads` as in `TensorPlan`, the others as in `ShardedOptimizer`."""
        super().__init__(named_parameters, group.everyone, **options)
        self._group, self._of_heads = group, frozenset(of_heads)
        self._sums: dict[str, Tensor] = {}

    def _summed_gradients(self) -> dict[str, Tensor]:
        full = [name for name, parameter in self._parameters.items() if not _is_in_parts(parameter)]
        for name in full:
            gradient = self._gradient(name)
            self._sums[name] = gradient if name in self._of_heads else gradient.div_(self._group.size)
        for flat, parts in buckets([self._sums[name] for name in full]):
            unflatten_buckets(self._group.sum(flat), parts)
        gradients = super()._summed_gradients()
        self._sums = {}
        return gradients

    def _gradient(self, name: str) -> Tensor:
        return self._sums[name] if name in self._sums else super()._gradient(name)


def _is_in_parts(parameter: nn.Parameter) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "tensor" in (names or ())
