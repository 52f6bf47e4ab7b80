"""How a policy comes to lie on the ranks: replicas, blocks (FSDP2) or DeepSpeed's partitions, and shared sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_cli.checkpointing import Restored
from rft_cli.machine import Machine
from rft_cli.model_choice import weights_dtype
from rft_dist.checkpoints.shards import Shard, ShardSink, Wanted, assign_by_bytes
from rft_dist.collectives import Collectives
from rft_dist.replicated import ReplicatedOptimizer
from rft_dist.settings import AdamSettings, StrategySettings
from rft_models.policy import CausalPolicy
from rft_trainer.protocols import Collectives as DataCollectives
from rft_trainer.protocols import Optimizer, SavablePolicy

WholeWeights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields (name, whole tensor) one after another; an exchange where weights are in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A policy on the ranks, and what trains, feeds, saves and copies it."""

    policy: CausalPolicy
    optimizer: Optimizer
    data: DataCollectives
    """The ranks as those see them that share samples out: a group that shares sequences is one."""
    in_step: bool
    """Whether every forward and backward is an exchange, so that all ranks must make equally many."""
    whole_weights: WholeWeights | None
    """Where an engine gets them; None = the parameters are whole and may be shared."""
    savable: SavablePolicy
    compute_dtype: torch.dtype
    """What the forward computes in: an engine should too."""


def held_dtype(strategy: StrategySettings, *, bf16: bool) -> torch.dtype:
    """The type that weights are loaded in."""
    if strategy.use_mp_opt:
        return torch.float32 if strategy.fsdp else torch.bfloat16
    return weights_dtype(bf16)


def spread_policy(
    policy: CausalPolicy,
    strategy: StrategySettings,
    adam: AdamSettings,
    machine: Machine,
    restored: Restored | None,
) -> Spread:
    """Lay a loaded policy out as the settings say, with an optimizer that is continued where a checkpoint is given."""
    ranks = machine.collectives
    data: DataCollectives = ranks
    if strategy.sp_size > 1:
        from rft_dist.strategies.sequence import DataRanks, SequenceGroup

        group = SequenceGroup(ranks, strategy.sp_size)
        policy.split_sequences(group)
        data = DataRanks(ranks, group)
    options: dict[str, Any] = {
        "betas": adam.adam_betas,
        "epsilon": adam.adam_epsilon,
        "weight_decay": adam.l2,
        "max_norm": adam.max_norm,
    }
    compute_dtype = torch.bfloat16 if strategy.use_mp_opt else policy.dtype
    in_step = strategy.fsdp or strategy.zero_stage > 0
    if strategy.fsdp:
        optimizer, weights, held = _fully_sharded(policy, strategy, machine, options)
    elif strategy.zero_stage:
        optimizer, weights, held = _zero(policy, strategy, machine, options)
    else:
        optimizer = ReplicatedOptimizer(
            policy.trainable_parameters(),
            ranks,
            **options,
            master=strategy.use_mp_opt,
            offload=strategy.adam_offload,
        )
        weights = held = policy.named_parameters
    _restore(optimizer, restored)
    return Spread(
        policy=policy,
        optimizer=optimizer,
        data=data,
        in_step=in_step,
        whole_weights=weights if spreads_weights(strategy) else None,
        savable=_WeightsInBlocks(policy, weights, held, ranks) if in_step else policy,
        compute_dtype=compute_dtype,
    )


def strategy_line(strategy: StrategySettings, *, bf16: bool) -> str:
    """How weights, gradients and moments lie, in words."""
    if strategy.fsdp:
        over = f"groups of {strategy.shard_size} ranks" if strategy.shard_size else "all ranks"
        parts = [f"FSDP2: weights, gradients and moments in blocks over {over}; a layer is gathered while it computes"]
        if strategy.fsdp_cpu_offload:
            parts.append("blocks, gradients and moments in host memory")
    elif strategy.zero_stage:
        spread = ("moments", "moments and gradients", "moments, gradients and weights")[strategy.zero_stage - 1]
        parts = [f"DeepSpeed ZeRO {strategy.zero_stage}: {spread} spread over all ranks"]
        if strategy.zpg > 1:
            parts.append(f"a second copy of the weights over every {strategy.zpg} ranks")
        if strategy.overlap_comm:
            parts.append("gradients are exchanged during the backward pass")
    else:
        parts = ["every rank holds all; gradients are summed once a step"]
    if strategy.use_mp_opt:
        parts.append("computed in bfloat16, stepped on in float32")
    elif bf16:
        parts.append("bfloat16 throughout")
    if strategy.adam_offload and not strategy.fsdp_cpu_offload:
        parts.append("moments in host memory")
    if strategy.sp_size > 1:
        parts.append(f"{strategy.sp_size} ranks share each sequence")
    return "; ".join(parts)


def spread_reference(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> CausalPolicy:
    """Lay weights that are not trained out: in blocks where those of the policy are."""
    if strategy.fsdp or strategy.zero_stage == 3:
        _shard(policy, strategy, machine)
    return policy


def spreads_weights(strategy: StrategySettings) -> bool:
    """Whether a rank holds a part of the weights only."""
    return strategy.fsdp or strategy.zero_stage == 3


_Held = Callable[[], Iterable[tuple[str, Tensor]]]


def _shard(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> Any:
    from rft_dist.strategies.fsdp import FullyShardedModel

    sharded = FullyShardedModel(
        policy.model,
        policy.layers,
        machine.collectives,
        device=torch.device(machine.device),
        shard_size=strategy.shard_size,
        compute_dtype=torch.bfloat16 if strategy.use_mp_opt and strategy.fsdp else None,
        cpu_offload=strategy.fsdp_cpu_offload,
    )
    policy.compute_through(sharded.compute)
    return sharded


def _fully_sharded(
    policy: CausalPolicy, strategy: StrategySettings, machine: Machine, options: dict[str, Any]
) -> tuple[Optimizer, WholeWeights, _Held]:
    from rft_dist.strategies.fsdp import ShardedOptimizer

    sharded = _shard(policy, strategy, machine)
    optimizer = ShardedOptimizer(
        policy.trainable_parameters(), machine.collectives, **options, offload=strategy.adam_offload
    )
    return optimizer, sharded.whole_tensors, sharded.held_tensors


def _zero(
    policy: CausalPolicy, strategy: StrategySettings, machine: Machine, options: dict[str, Any]
) -> tuple[Optimizer, WholeWeights, _Held]:
    from rft_dist.strategies.zero import ZeroModel

    zero = ZeroModel(
        policy.model,
        policy.layers,
        machine.collectives,
        device=torch.device(machine.device),
        stage=strategy.zero_stage,
        cpu_offload=strategy.adam_offload,
        hpz_size=strategy.zpg,
        overlap_comm=strategy.overlap_comm,
        **options,
    )
    policy.compute_through(zero.compute)
    optimizer = _ZeroOptimizer(zero.optimizer, zero.optimizer.state)
    return optimizer, zero.whole_tensors, lambda: ((shard.name, shard.data) for shard in zero.weights.shards())


@dataclass(frozen=True, slots=True)
class _ZeroOptimizer:
    """DeepSpeed's optimizer as loops and checkpoints see it: its state is given and taken in blocks."""

    inner: Any
    state: Any

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradient of a micro-batch."""
        self.inner.backward(loss, last=last)

    def step(self, learning_rate: float) -> Any:
        """Clip, update, clear."""
        return self.inner.step(learning_rate)

    def state_tensors(self) -> dict[str, Tensor]:
        """What this rank holds."""
        return self.inner.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave on this rank."""
        self.inner.load_state_tensors(tensors)

    def shards(self) -> Sequence[Shard]:
        """See `ShardSource`."""
        return self.state.shards()

    def wanted(self) -> Sequence[Wanted]:
        """See `ShardSink`."""
        return self.state.wanted()

    def put(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """See `ShardSink`."""
        self.state.put(name, start, tensor)


def _restore(optimizer: Any, restored: Restored | None) -> None:
    if restored is None:
        return
    if hasattr(optimizer, "wanted"):
        sink: ShardSink = optimizer
        restored.checkpoint.load("optimizer", sink)
    else:
        optimizer.load_state_tensors(restored.optimizer_tensors())


@dataclass(frozen=True, slots=True)
class _WeightsInBlocks:
    """A policy whose weights are saved by all ranks together."""

    policy: CausalPolicy
    weights: WholeWeights
    held: _Held
    ranks: Collectives

    def own_weights(self) -> Mapping[str, Tensor]:
        """Whole weights that this rank writes: every rank about as many bytes; all ranks call it."""
        owners = assign_by_bytes(_sizes(self.policy.named_parameters()), self.ranks.world_size)
        found: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if owners[name] == self.ranks.rank:
                found[name] = tensor.detach().clone()
        return found

    def save_description(self, directory: Path) -> None:
        """Configuration and tokenizer."""
        self.policy.save_description(directory)

    def save_pretrained(self, directory: Path) -> None:
        """Not possible by one rank."""
        raise AssertionError("weights in blocks are written by all ranks")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds."""
        yield from self.held()

    def token_logprobs(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The policy's."""
        return self.policy.token_logprobs(*arguments, **options)


def _sizes(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Name -> elements of the whole parameter; DeepSpeed keeps an empty tensor in the place of one in parts."""
    return {name: int(getattr(parameter, "ds_numel", parameter.numel())) for name, parameter in named}
