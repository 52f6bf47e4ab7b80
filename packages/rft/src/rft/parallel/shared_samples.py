"""Ranks that share samples: sequence parallel (`--sp_size`) and tensor parallel (`--tp_size`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft.process.machine import Machine
from rft_dist.settings import StrategySettings
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.protocols import Collectives as DataCollectives
from rft_trainer.protocols import Optimizer

if TYPE_CHECKING:
    from rft_dist.strategies.tensor_parallel import TensorGroup


NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Ranks that share samples with this one."""

    data: DataCollectives
    """The ranks as those see them that share samples out: a group that computes together is one."""
    tensor_group: TensorGroup | None = None


def share_samples(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> Sharing:
    """Make the groups; with shared sequences the policy computes with its group from now on."""
    ranks = machine.collectives
    if strategy.sp_size == 1 and strategy.tp_size == 1:
        return Sharing(ranks)
    from rft_dist.strategies.process_groups import DataParallelRanks

    if strategy.tp_size > 1:
        from rft_dist.strategies.tensor_parallel import TensorGroup

        tensor_group = TensorGroup(ranks, strategy.tp_size, torch.device(machine.device))
        return Sharing(DataParallelRanks(ranks, tensor_group), tensor_group)
    from rft_dist.strategies.sequence_parallel import SequenceGroup

    group = SequenceGroup(ranks, strategy.sp_size)
    policy.enable_sequence_parallel(group, strategy.sp_mode)
    return Sharing(DataParallelRanks(ranks, group))


def shard_matrices(policy: CausalPolicy, group: TensorGroup) -> tuple[NamedTensors, NamedTensors, tuple[str, ...]]:
    """(provider of whole weights, of this rank's parts, gains of heads) of a policy that is cut over the group."""
    from rft_dist.strategies.tensor_parallel import TensorParallelModel
    from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel, tensor_plan

    plan = tensor_plan(policy, group.size)
    made: list[TensorParallelModel] = []
    apply_tensor_parallel(
        policy,
        lambda: made.append(TensorParallelModel(policy.model, plan, group)),
        group,
        shares_head=bool(plan.vocabulary),
    )
    return made[0].full_tensors, made[0].local_shards, plan.of_heads


def tensor_parallel(
    policy: CausalPolicy, group: TensorGroup, options: dict[str, Any]
) -> tuple[Optimizer, NamedTensors, NamedTensors]:
    """(optimizer, provider of whole weights, of this rank's parts) of a policy that is cut over the group."""
    from rft_dist.strategies.tensor_parallel import TensorParallelOptimizer

    weights, local_tensors, of_heads = shard_matrices(policy, group)
    optimizer = TensorParallelOptimizer(policy.trainable_parameters(), group, of_heads=of_heads, **options)
    return optimizer, weights, local_tensors


def sharded_parts(
    policy: CausalPolicy, group: TensorGroup, shard: Callable[[Any], Any], options: dict[str, Any]
) -> tuple[Optimizer, NamedTensors, NamedTensors]:
    """The same for parts that are spread again, by `shard(ranks that hold the same parts)`."""
    from rft_dist.strategies.tensor_parallel_fsdp import TensorShardedOptimizer

    _, _, of_heads = shard_matrices(policy, group)
    sharded = shard(group.data_mesh)
    optimizer = TensorShardedOptimizer(policy.trainable_parameters(), group, of_heads=of_heads, **options)
    return optimizer, sharded.full_tensors, sharded.local_shards


def shard_reference(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> TensorGroup:
    """Cut weights that are not trained as those of the policy are, over groups of the same ranks."""
    from rft_dist.strategies.tensor_parallel import TensorGroup

    group = TensorGroup(machine.collectives, strategy.tp_size, torch.device(machine.device))
    shard_matrices(policy, group)
    return group
