"""Tensor parallel combined with FSDP2: each part of a matrix is sharded over the ranks that hold the same part.

The ranks are a grid of two dimensions, "data" by "tensor". A row of it computes together (`TensorParallelModel`, which
comes first); down a column FSDP2 cuts what each rank would hold into blocks, gathers a layer while it computes, and
sums gradients (`FullyShardedModel` on `TensorGroup.data_mesh`). Bytes of a rank for P parameters, float32 AdamW:
16 P / (data x tensor), and the gathered layer's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft_dist.optim.adamw import StepOutcome
from rft_dist.strategies.fsdp import ShardedOptimizer
from rft_dist.strategies.tensor_parallel import TensorGroup, buckets, unflatten_buckets


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
        **options: Any,
    ) -> None:
        """`of_heads` as in `TensorPlan`, the others as in `ShardedOptimizer`."""
        super().__init__(named_parameters, group.everyone, **options)
        self._group, self._of_heads = group, frozenset(of_heads)
        self._sums: dict[str, Tensor] = {}

    def step(self, learning_rate: float) -> StepOutcome:
        """Sum what every rank of a row has, clip, update, clear; all ranks or none."""
        full = [name for name, parameter in self._parameters.items() if not _is_in_parts(parameter)]
        for name in full:
            gradient = self._gradient(name)
            self._sums[name] = gradient if name in self._of_heads else gradient.div_(self._group.size)
        for flat, parts in buckets([self._sums[name] for name in full]):
            unflatten_buckets(self._group.sum(flat), parts)
        outcome = super().step(learning_rate)
        self._sums = {}
        return outcome

    def _gradient(self, name: str) -> Tensor:
        return self._sums[name] if name in self._sums else super()._gradient(name)


def _is_in_parts(parameter: nn.Parameter) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "tensor" in (names or ())
