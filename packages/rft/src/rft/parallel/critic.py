"""Parallelize a critic: replicated on each rank, or sharded where the policy is (`--fsdp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.checkpoints.writer import ResumePoint
from rft.parallel.optimizer_restore import restore_optimizer
from rft.process.machine import Machine
from rft_core.packed_tokens import PackedTokens
from rft_dist.checkpoint_format.shards import Shard, ShardRequest
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_models.critic.causal_critic import CausalCritic
from rft_trainer.protocols import Critic, Optimizer
from rft_trainer.runs.checkpointing import StatefulTensors


@dataclass(frozen=True, slots=True)
class ParallelCritic:
    """A critic on the ranks, what trains it, and what a checkpoint holds of its weights."""

    critic: Critic
    """As the loop calls it."""
    optimizer: Optimizer
    weights: StatefulTensors
    in_step: bool
    """Whether every forward and backward is an exchange, so that all ranks must make equally many."""


def parallelize_critic(
    critic: CausalCritic,
    strategy: StrategySettings,
    adam: AdamSettings,
    machine: Machine,
    restored: ResumePoint | None,
) -> ParallelCritic:
    """Parallelize a loaded critic, and restore it from a checkpoint of any layout where one is given.

    Its weights are stepped on in the type that they are loaded in.
    """
    options: dict[str, Any] = {
        "betas": adam.adam_betas,
        "epsilon": adam.adam_epsilon,
        "weight_decay": adam.l2,
        "max_norm": adam.max_norm,
    }
    if not strategy.fsdp:
        full = CriticWeights(critic)
        if restored is not None:
            full.load_state_tensors(restored.checkpoint.tensors("critic"))
        optimizer = DataParallelOptimizer(critic.named_parameters(), machine.collectives, **options)
        restore_optimizer(optimizer, restored, "critic_optimizer")
        return ParallelCritic(critic, optimizer, full, in_step=False)
    from rft_dist.strategies.fsdp import FullyShardedModel, ShardedOptimizer

    sharded = FullyShardedModel(
        _AllWeights(critic),
        [*critic.model.get_decoder().layers, critic.head],  # the head alone: it is float32, whatever the others are
        machine.collectives,
        device=torch.device(machine.device),
        shard_size=strategy.shard_size if strategy.tp_size == 1 else None,
        cpu_offload=strategy.fsdp_cpu_offload,
    )
    critic.gather_always()
    if critic.tower is not None:
        critic.tower.runs_always = True  # also for rows without images, so that all ranks gather it
    blocks = CriticBlocks(critic, machine.ranks.rank)
    if restored is not None:
        restored.checkpoint.load("critic", blocks)
    options["offload"] = strategy.adam_offload
    optimizer = ShardedOptimizer(critic.named_parameters(), machine.collectives, **options)
    restore_optimizer(optimizer, restored, "critic_optimizer")
    return ParallelCritic(GatheredCritic(critic, sharded.compute), optimizer, blocks, in_step=True)


class _AllWeights(nn.Module):
    """Decoder and head as one module."""

    def __init__(self, critic: CausalCritic) -> None:
        super().__init__()
        self.model, self.head = critic.model, critic.head

    def forward(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call `function` while all parameters are gathered."""
        return function(*arguments)


@dataclass(frozen=True, slots=True)
class GatheredCritic:
    """A critic whose weights are gathered for every forward; all ranks make equally many."""

    inner: CausalCritic
    compute: Callable[..., Tensor]
    """Calls a function with the weights there."""

    def values(self, tokens: PackedTokens) -> Tensor:
        """Compute the critic's values with its weights gathered."""
        return self.compute(self.inner.values, tokens)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the sharded parameters by name."""
        return self.inner.named_parameters()


@dataclass(frozen=True, slots=True)
class CriticWeights:
    """The critic's weights as a part of a checkpoint."""

    critic: CausalCritic

    def state_tensors(self) -> dict[str, Tensor]:
        """Every weight by name."""
        return {name: parameter.detach() for name, parameter in self.critic.named_parameters()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of `state_tensors()` into the critic."""
        for name, parameter in self.critic.named_parameters():
            parameter.copy_(tensors[name])


@dataclass(frozen=True, slots=True)
class CriticBlocks:
    """The critic's sharded weights (`ShardSource`, `ShardSink`); a checkpoint of either layout restores the other."""

    critic: CausalCritic
    rank: int

    def state_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shard of each weight; none of some, where there are more ranks than rows."""
        from rft_dist.strategies.dtensor_shards import local

        shards = {name: local(parameter.detach()) for name, parameter in self.critic.named_parameters()}
        return {name: block for name, block in shards.items() if block.numel()}

    def shards(self) -> Sequence[Shard]:
        """Return this rank's shards; one that several ranks hold comes from the lowest of them."""
        from rft_dist.strategies.dtensor_shards import is_first_copy, start_of

        parameters = dict(self.critic.named_parameters())
        return [
            Shard(name, tuple(parameters[name].shape), start_of(parameters[name]), block.contiguous())
            for name, block in self.state_tensors().items()
            if is_first_copy(parameters[name], self.rank)
        ]

    def shard_requests(self) -> Sequence[ShardRequest]:
        """The blocks that this rank holds."""
        from rft_dist.strategies.dtensor_shards import start_of

        parameters = dict(self.critic.named_parameters())
        return [
            ShardRequest(
                name, tuple(parameters[name].shape), block.dtype, start_of(parameters[name]), tuple(block.shape)
            )
            for name, block in self.state_tensors().items()
        ]

    @torch.no_grad()
    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Copy a block that was read into this rank's shard."""
        del start
        self.state_tensors()[name].copy_(tensor)
