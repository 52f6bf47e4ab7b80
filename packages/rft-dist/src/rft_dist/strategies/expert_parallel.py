"""Expert parallel: each rank holds some experts of every layer, and the tokens of all go to where their experts are.

Neighbouring ranks are a group over which the experts of a layer are divided by number (Lepikhin et al. 2020, "GShard",
arXiv 2006.16668, section 3.3). In a layer every rank sends each of its tokens to the ranks that hold the token's
experts, runs its own experts on what has come, and gets the results back: two exchanges a layer forward, two backward.
All else is whole on every rank, and every rank has samples of its own.

The gradient of an expert comes from the tokens of all ranks of its group already, so it is summed over the groups
alone; all other gradients are summed over all ranks. Bytes of a rank for P parameters, E of them of experts, over S
ranks, float32 AdamW: about 16 (P - E + E / S).
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.distributed.tensor import Shard as CutBy
from torch.distributed.tensor import distribute_tensor

from rft_dist.strategies.data_parallel import verify_equal_weights, weights_of
from rft_dist.strategies.process_groups import ExpertGroup
from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext, narrow_dtype
from rft_dist.strategies.tensor_parallel import TensorParallelOptimizer, keep_own_memory


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Divide a model's experts over groups of ranks, and make the optimizer of what this rank holds."""
    first_rows = model.release_trained_rows()
    group = ExpertGroup(context.collectives, context.settings.ep_size, context.device)
    model.enable_expert_parallel(group, lambda names: divide_experts(model.module, names, group))
    optimizer = None
    if context.adam is not None:
        optimizer = ExpertParallelOptimizer(
            model.trainable_parameters(),
            group,
            **context.adamw_options(model, master=narrow_dtype(context.settings) is not None, first_rows=first_rows),
        )
    return DistributedModel(
        data=context.collectives, weights=weights_of(model, context, optimizer), optimizer=optimizer
    )


def divide_experts(model: nn.Module, names: Collection[str], group: ExpertGroup) -> None:
    """Keep this rank's experts of parameters whose first dimension counts experts, in place.

    Args:
        model: every rank must hold the same weights.
        names: of these parameters, in `model`.
        group: its size divides the first dimensions.

    Raises:
        PeerError: the weights differ between the ranks.
    """
    # `src_data_rank=None` below sends nothing: each rank cuts its own copy, so the copies must be equal
    verify_equal_weights(model.named_parameters(), group.everyone)
    for name in names:
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        parameter = layer.get_parameter(own)
        parts = distribute_tensor(parameter.detach(), group.mesh, [CutBy(0)], src_data_rank=None)
        layer.register_parameter(own, nn.Parameter(parts, requires_grad=parameter.requires_grad))
    keep_own_memory(model)


class ExpertParallelOptimizer(TensorParallelOptimizer):
    """AdamW over the experts that this rank holds and over all else, with the norm of the whole gradient.

    Gradients of experts are summed over the groups once a step, those of all else over all ranks. Every rank calls
    `backward` as often as the others.
    """

    def _share(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient as it is: it is of this rank's samples alone."""
        del name
        return gradient
