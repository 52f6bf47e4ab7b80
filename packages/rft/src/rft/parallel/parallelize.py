"""Load and parallelize a model: data parallel, FSDP2, DeepSpeed ZeRO, tensor or sequence parallel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import nn

from rft.checkpoints.writer import ResumePoint
from rft.parallel.compiled import compile_layers
from rft.parallel.shardable import ParallelizableModel
from rft.process.machine import Machine
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.planning.parallel_dims import EXPERTS, refuse_uneven_group
from rft_dist.settings import AdamSettings, StrategySettings, factors_of
from rft_dist.strategies.autocast import compute_type
from rft_dist.strategies.protocols import DataRanks, ModelWeights, StrategyContext, narrow_dtype
from rft_dist.strategies.registry import choose_strategy
from rft_models.files.divisibility import refuse_uneven_experts_of, refuse_uneven_model
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load_for_training import load_for_training
from rft_models.settings import AdapterSettings, ModelSettings
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.metrics.compute_meter import ComputeMeter, device_peak
from rft_trainer.metrics.weight_change import WeightSample

if TYPE_CHECKING:
    from rft_dist.strategies.optimizer import StrategyOptimizer

ModelT = TypeVar("ModelT")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel(Generic[ModelT]):
    """A model on the ranks: what computes with it, what trains it, and where its weights are."""

    model: ModelT
    """As loops and scorers call it."""
    trained_by: StrategyOptimizer | None
    """None = the weights are not trained."""
    weights: ModelWeights
    """The weights in full, gathered from all ranks, and as this rank keeps and saves them."""
    data: DataRanks
    """The ranks as batches are divided among them: a group that computes a sample together is one."""
    collective_forward: bool
    """Whether every forward and backward is an exchange, so that all ranks must make equally many."""
    shards_weights: bool
    """Whether a rank keeps only a part of the weights."""
    compute_dtype: torch.dtype
    """What the forward computes in: an engine should too."""
    module: nn.Module
    """The module that has every parameter."""
    meter: ComputeMeter | None
    """Counts the arithmetic of what it is trained on; None = it is not trained."""
    sample: WeightSample | None
    """Measures the updates of the weights; None = they are not trained."""
    averages: SwapInEma | None
    """Puts the moving averages in the place of the weights for a while; None = there are none."""

    @property
    def optimizer(self) -> StrategyOptimizer:
        """The optimizer of a model that is trained."""
        assert self.trained_by is not None, "these weights are not trained"
        return self.trained_by


def parallelize(
    model: ParallelizableModel[ModelT],
    strategy: StrategySettings,
    adam: AdamSettings | None,
    machine: Machine,
    restored: ResumePoint | None = None,
    *,
    component: str = "optimizer",
) -> ParallelModel[ModelT]:
    """Distribute a loaded model over the ranks, in place, and make its optimizer.

    Args:
        model: policy, reference or critic, with the same weights on every rank.
        strategy: the settings that choose how; those of a reference and of a critic follow from the policy's
            (`ParallelStrategy.reference`, `ParallelStrategy.critic`).
        adam: the weight update; None = the weights are not trained, and there is no optimizer.
        machine: the ranks and the device.
        restored: a checkpoint of any strategy and number of ranks, which the optimizer continues from.
        component: the optimizer's name in the checkpoint.
    """
    chosen, device = choose_strategy(strategy), torch.device(machine.device)
    strategy, autocast = _by_capability(strategy, device, machine, show=adam is not None)
    context = StrategyContext(settings=strategy, collectives=machine.collectives, device=device, adam=adam)
    compute_dtype = autocast or narrow_dtype(strategy) or model.dtype
    # before distribution, which leaves a rank parts of the matrices
    meter = None if adam is None else _meter(model, machine, device)
    distributed = chosen.parallelize(model, context)
    if autocast is not None:
        model.compute_in(autocast)
    if adam is not None:
        compile_layers(model.blocks, strategy, machine)
    optimizer = distributed.optimizer
    # after distribution: each rank reads its own part of the saved state
    if optimizer is not None and restored is not None:
        optimizer.restore(restored.checkpoint.component(component))
    return ParallelModel(
        model=model.inner,
        trained_by=optimizer,
        weights=distributed.weights,
        data=distributed.data,
        collective_forward=chosen.collective_forward,
        shards_weights=chosen.shards_weights(strategy),
        compute_dtype=compute_dtype,
        module=model.module,
        meter=meter,
        sample=None if adam is None or optimizer is None else _sample(distributed.weights, optimizer, adam),
        averages=optimizer.swap_in_ema if optimizer is not None and strategy.enable_ema else None,
    )


def _sample(weights: ModelWeights, optimizer: StrategyOptimizer, adam: AdamSettings) -> WeightSample:
    factors = ParameterGroups(rates=factors_of("lr_factors", adam.lr_factors))

    def copies() -> Iterator[torch.Tensor]:
        return (tensor for name, tensor in optimizer.state_tensors().items() if name.startswith("master/"))

    return WeightSample(weights, moves=lambda name: factors.rate_factor(name) > 0, copies=copies)


def _meter(model: ParallelizableModel[ModelT], machine: Machine, device: torch.device) -> ComputeMeter:
    flops = model.training_flops()
    return ComputeMeter(flops.of, num_devices=machine.collectives.world_size, peak=device_peak(device))


def _by_capability(
    strategy: StrategySettings, device: torch.device, machine: Machine, *, show: bool
) -> tuple[StrategySettings, torch.dtype | None]:
    """Return the settings with the type that autocast computes in, and that type; None = there is no autocast."""
    if not strategy.amp:
        return strategy, None
    found = compute_type(strategy, device, machine.collectives)
    if show and machine.is_first:
        _LOG.info("amp: %s (%s)", found.name, found.reason)
    if found.dtype is None:
        return replace(strategy, amp=False, amp_dtype="auto"), None
    return replace(strategy, amp_dtype="fp16" if found.dtype == torch.float16 else "bf16"), found.dtype


def trainable_policy(
    settings: ModelSettings,
    strategy: StrategySettings,
    source: str | Path,
    machine: Machine,
    tokenizer: HfTokenizer,
    adapter: AdapterSettings,
) -> CausalPolicy:
    """Load the weights in `source` as the strategy wants them, ready to be parallelized and trained."""
    dtype = held_dtype(strategy, bf16=settings.bf16)
    # config.json says whether the ranks divide the matrices, so no weight is read for a refusal
    refuse_uneven_model(source, choose_strategy(strategy).group_sizes(strategy).matrix)
    refuse_uneven_experts_of(source, strategy.ep_size)
    refuse_uneven_group(strategy.ep_size, machine.collectives.world_size, **EXPERTS)
    return load_for_training(
        source, settings, adapter, dtype=dtype, device=machine.device, tokenizer=tokenizer, on_meta=strategy.meta_init
    )


def held_dtype(strategy: StrategySettings, *, bf16: bool) -> torch.dtype:
    """The type that weights are loaded in."""
    narrow = narrow_dtype(strategy)
    # with float32 shards the forward narrows them; otherwise the optimizer steps on float32 copies
    if narrow is not None:
        return torch.float32 if choose_strategy(strategy).sharding(strategy).float32_weights else narrow
    return weights_dtype(bf16)


def weights_dtype(bf16: bool) -> torch.dtype:
    """The type that weights are held in."""
    return torch.bfloat16 if bf16 else torch.float32


def is_sharded(strategy: StrategySettings) -> bool:
    """Return True when a rank keeps only a part of the weights."""
    return choose_strategy(strategy).shards_weights(strategy)
