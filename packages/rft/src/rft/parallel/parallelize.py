"""Parallelize a policy: data parallel, FSDP2, DeepSpeed ZeRO, tensor or sequence parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft.checkpoints.ema_weights import while_averaged
from rft.checkpoints.writer import ResumePoint
from rft.parallel.optimizer_restore import restore_optimizer
from rft.parallel.shared_samples import (
    Sharing,
    shard_reference,
    sharded_parts,
    share_samples,
    tensor_parallel,
)
from rft.process.machine import Machine
from rft_core.packed_tokens import PackedTokens
from rft_dist.checkpoint_format.shards import Shard, ShardRequest, assign_by_bytes
from rft_dist.collectives import Collectives
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.lora import files as adapter_files
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.protocols import Collectives as DataCollectives
from rft_trainer.protocols import Optimizer, SavablePolicy

WholeWeights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields (name, whole tensor) one after another; an exchange where weights are in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
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
    whole_adapters: WholeWeights | None = None
    """Where an engine gets the adapters alone; None = they are whole, or there are none."""
    averages: SwapInEma | None = None
    """Puts the moving averages in the place of the weights for a while; None = there are none."""

    @property
    def fused(self) -> CausalPolicy | None:
        """The policy where its head may make gradients in the forward pass: float16 has to be scaled before that."""
        return None if self.compute_dtype == torch.float16 else self.policy


def held_dtype(strategy: StrategySettings, *, bf16: bool) -> torch.dtype:
    """The type that weights are loaded in."""
    narrow = _narrow_dtype(strategy)
    if narrow is not None:
        return torch.float32 if strategy.fsdp else narrow
    return weights_dtype(bf16)


def _narrow_dtype(strategy: StrategySettings) -> torch.dtype | None:
    """Return the compute dtype beside float32 master weights; None = weights are stepped on in their own dtype."""
    if strategy.fp16:
        return torch.float16
    return torch.bfloat16 if strategy.use_mp_opt else None


def parallelize(
    policy: CausalPolicy,
    strategy: StrategySettings,
    adam: AdamSettings,
    machine: Machine,
    restored: ResumePoint | None,
) -> ParallelModel:
    """Parallelize a loaded policy and make its optimizer, restored where a checkpoint is given."""
    ranks = machine.collectives
    sharing = share_samples(policy, strategy, machine)
    options: dict[str, Any] = {
        "betas": adam.adam_betas,
        "epsilon": adam.adam_epsilon,
        "weight_decay": adam.l2,
        "max_norm": adam.max_norm,
        "ema_decay": strategy.ema_decay if strategy.enable_ema else None,
    }
    narrow = _narrow_dtype(strategy)
    compute_dtype = narrow or policy.dtype
    in_step = strategy.fsdp or strategy.zero_stage > 0
    if strategy.fsdp:
        optimizer, weights, local_tensors = _fully_sharded(policy, strategy, machine, options, sharing)
    elif strategy.zero_stage:
        optimizer, weights, local_tensors = _zero(policy, strategy, machine, options)
    elif sharing.tensor_group is not None:
        stepping = {"master": narrow is not None, "offload": strategy.adam_offload, "scaler": _scaler(strategy)}
        optimizer, weights, local_tensors = tensor_parallel(policy, sharing.tensor_group, options | stepping)
    else:
        optimizer = DataParallelOptimizer(
            policy.trainable_parameters(),
            ranks,
            **options,
            master=narrow is not None,
            offload=strategy.adam_offload,
            scaler=_scaler(strategy),
        )
        weights = local_tensors = policy.named_parameters
    restore_optimizer(optimizer, restored)
    return ParallelModel(
        policy=policy,
        optimizer=optimizer,
        data=sharing.data,
        in_step=in_step,
        whole_weights=(lambda: policy.merged_parameters(weights())) if is_sharded(strategy) else None,
        savable=_WeightsInBlocks(policy, weights, local_tensors, ranks) if in_step or is_sharded(strategy) else policy,
        compute_dtype=compute_dtype,
        whole_adapters=_adapters_alone(policy, weights) if is_sharded(strategy) else None,
        averages=while_averaged(policy, optimizer, ranks) if strategy.enable_ema else None,
    )


def parallelize_reference(policy: CausalPolicy, strategy: StrategySettings, machine: Machine) -> CausalPolicy:
    """Shard weights that are not trained where the policy's are sharded."""
    group = shard_reference(policy, strategy, machine) if strategy.tp_size > 1 else None
    if strategy.fsdp or strategy.zero_stage == 3:
        _shard(policy, strategy, machine, None if group is None else group.data_mesh)
    return policy


def is_sharded(strategy: StrategySettings) -> bool:
    """Return True when a rank holds only a part of the weights."""
    return strategy.fsdp or strategy.zero_stage == 3 or strategy.tp_size > 1


def _adapters_alone(policy: CausalPolicy, weights: Callable[..., Any]) -> WholeWeights | None:
    return None if policy.adapters is None else partial(weights, trained=True)


_Held = Callable[[], Iterable[tuple[str, Tensor]]]


def _shard(policy: CausalPolicy, strategy: StrategySettings, machine: Machine, mesh: Any = None) -> Any:
    from rft_dist.strategies.fsdp import FullyShardedModel

    sharded = FullyShardedModel(
        policy.model,
        policy.layers,
        machine.collectives,
        device=torch.device(machine.device),
        shard_size=strategy.shard_size,
        compute_dtype=_narrow_dtype(strategy) if strategy.fsdp else None,
        cpu_offload=strategy.fsdp_cpu_offload,
        mesh=mesh,
    )
    policy.wrap_forward(sharded.compute)
    if policy.pending_weights is not None:
        device, files = torch.device(machine.device), policy.pending_weights
        sharded.load_shards(files.block, device)
        files.close()
        # the files are closed: every block is in memory
        policy.pending_weights = None
        policy.verify(device=device, dtype=_narrow_dtype(strategy))
    return sharded


def _fully_sharded(
    policy: CausalPolicy, strategy: StrategySettings, machine: Machine, options: dict[str, Any], sharing: Sharing
) -> tuple[Optimizer, WholeWeights, _Held]:
    from rft_dist.strategies.fsdp import ShardedOptimizer

    options = options | {"offload": strategy.adam_offload, "scaler": _scaler(strategy)}
    if sharing.tensor_group is not None:
        return sharded_parts(policy, sharing.tensor_group, partial(_shard, policy, strategy, machine), options)
    sharded = _shard(policy, strategy, machine)
    optimizer = ShardedOptimizer(policy.trainable_parameters(), machine.collectives, **options)
    return optimizer, sharded.full_tensors, sharded.local_shards


def _scaler(strategy: StrategySettings) -> LossScaler | None:
    return LossScaler() if strategy.fp16 else None


def _zero(
    policy: CausalPolicy, strategy: StrategySettings, machine: Machine, options: dict[str, Any]
) -> tuple[Optimizer, WholeWeights, _Held]:
    from rft_dist.strategies.zero.optimizer import ZeroModel

    zero = ZeroModel(
        policy.model,
        policy.layers,
        machine.collectives,
        device=torch.device(machine.device),
        stage=strategy.zero_stage,
        cpu_offload=strategy.adam_offload,
        hpz_size=strategy.zpg,
        overlap_comm=strategy.overlap_comm,
        readers=() if policy.adapters is None else policy.adapters.readers(),
        **options,
    )
    policy.wrap_forward(zero.compute)
    optimizer = _ZeroOptimizer(zero.optimizer, zero.optimizer.state, zero.weights)
    return optimizer, zero.full_tensors, lambda: ((shard.name, shard.data) for shard in zero.weights.shards())


@dataclass(frozen=True, slots=True)
class _ZeroOptimizer:
    """DeepSpeed's optimizer with the interface of loops and checkpoints; its state is sharded."""

    inner: Any
    state: Any
    weights: Any

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradient of a micro-batch."""
        self.inner.backward(loss, last=last)

    def step(self, learning_rate: float) -> Any:
        """Clip the gradient, update the weights, clear the gradient."""
        return self.inner.step(learning_rate)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank holds."""
        return self.inner.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state_tensors` returned on this rank."""
        self.inner.load_state_tensors(tensors)

    def shards(self) -> Sequence[Shard]:
        """Return the shards of the state (`ShardSource`)."""
        return self.state.shards()

    def shard_requests(self) -> Sequence[ShardRequest]:
        """Return the shards to read (`ShardSink`)."""
        return self.state.shard_requests()

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Write a block into the state (`ShardSink`)."""
        self.state.write(name, start, tensor)


@dataclass(frozen=True, slots=True)
class _WeightsInBlocks:
    """A policy whose weights are saved by all ranks together."""

    policy: CausalPolicy
    weights: WholeWeights
    held: _Held
    ranks: Collectives
    adapters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def own_weights(self) -> Mapping[str, Tensor]:
        """Return the full weights that this rank writes, about as many bytes on every rank; all ranks call it."""
        owners = assign_by_bytes(_sizes(self.policy.base_parameters()), self.ranks.world_size)
        full: dict[str, Tensor] = {}
        self.adapters.clear()
        for name, tensor in self.policy.merged_parameters(self._keeping_adapters()):
            # every rank must draw the iterator to its end, as each tensor is gathered by all
            if owners[name] == self.ranks.rank:
                full[name] = tensor.detach().clone()
        return dict(to_checkpoint_names(self.policy.model, full.items)())

    def _keeping_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors; those of adapters are small, and kept for `description`."""
        adapters = self.policy.adapters
        for name, tensor in self.weights():
            if adapters is not None:
                self.adapters.update({n: part.clone() for n, part in adapters.tensors([(name, tensor)]).items()})
            yield name, tensor

    def description(self) -> Callable[[Path], None]:
        """Return a function that writes configuration, tokenizer, and the adapters as `own_weights` collected them."""
        kept = dict(self.adapters)

        def write(directory: Path) -> None:
            self.policy.save_description(directory)
            if self.policy.adapters is not None:
                adapter_files.save(self.policy.adapters, Path(directory) / adapter_files.FOLDER, kept)

        return write

    def save_description(self, directory: Path) -> None:
        """Write configuration, tokenizer and adapters."""
        self.description()(directory)

    def save_pretrained(self, directory: Path) -> None:
        """Raise: sharded weights cannot be written by one rank."""
        raise AssertionError("weights in blocks are written by all ranks")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank holds."""
        yield from self.held()

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the policy's token log-probabilities."""
        return self.policy.token_logprobs(tokens, **options)


def _sizes(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Return name -> elements of the full parameter; DeepSpeed keeps an empty tensor in the place of one in parts."""
    return {name: int(getattr(parameter, "ds_numel", parameter.numel())) for name, parameter in named}


def weights_dtype(bf16: bool) -> torch.dtype:
    """The type that weights are held in."""
    return torch.bfloat16 if bf16 else torch.float32
