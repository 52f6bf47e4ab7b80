"""The parallel strategies: one row each, and the row that a run's settings choose. No torch is imported here.

A strategy is a module with a function `parallelize(model: ShardableModel, context: StrategyContext) ->
DistributedModel`, and a row of `STRATEGIES`. The rows are asked in order; the last one takes every run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rft_dist.planning.memory_estimate import Sharding
from rft_dist.settings import StrategySettings

if TYPE_CHECKING:
    from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext

Values = Mapping[str, Any]
"""Settings of a run by name."""


@dataclass(frozen=True, slots=True)
class StrategyRefusal:
    """A combination of settings that a strategy cannot do, and the nearest that can."""

    code: str
    names: tuple[str, ...]
    """The settings that contradict one another."""
    applies: Callable[[Values], Any]
    """Whether these settings are the combination, as a truth value."""
    why: str
    do: str
    """The flags to give instead; names of settings in braces stand for their values."""

    def remedy(self, values: Values) -> str:
        """Return the flags to give instead of these settings."""
        return self.do.format_map(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStrategy:
    """One way to distribute weights, gradients and moments over ranks."""

    name: str
    module: str
    """The module whose `parallelize` distributes a model; imported at that moment."""
    chosen: Callable[[StrategySettings], bool]
    """Whether these settings choose it, where no row before it was chosen."""
    sharding: Callable[[StrategySettings], Sharding]
    """What of the training state its ranks divide: the term of the memory estimate."""
    ranks_per_sample: Callable[[StrategySettings], int] = lambda settings: settings.sp_size
    """Ranks that compute every sample together; all others compute different samples."""
    shards_weights: Callable[[StrategySettings], bool] = lambda settings: False
    """Whether a rank keeps only a part of the weights between two forwards."""
    collective_forward: bool = False
    """Whether every forward and backward is an exchange, so that all ranks must make equally many."""
    float32_weights: bool = False
    """Whether it keeps float32 weights where the forward computes in a narrower type, in place of master copies."""
    reference: Callable[[StrategySettings], StrategySettings] = lambda settings: settings
    """Settings by which a model of the same size that is not trained is distributed."""
    critic: Callable[[StrategySettings], StrategySettings] = lambda settings: _full_copies(settings)
    """Settings by which a critic is distributed, whose weights are stepped on in their own type."""
    refusals: tuple[StrategyRefusal, ...] = ()

    def parallelize(self, model: ShardableModel, context: StrategyContext) -> DistributedModel:
        """Distribute a model in place, see `strategies.protocols`."""
        distribute: Callable[[ShardableModel, StrategyContext], DistributedModel] = importlib.import_module(
            self.module
        ).parallelize
        return distribute(model, context)


def _full_copies(settings: StrategySettings) -> StrategySettings:
    """Return settings under which every rank keeps full weights, of the type they are loaded in."""
    return replace(_own_type(settings), zero_stage=0, sp_size=1, tp_size=1, adam_offload=False)


def _own_type(settings: StrategySettings) -> StrategySettings:
    """Return the settings without a narrower type for the forward, and without averages."""
    return replace(settings, use_mp_opt=False, fp16=False, enable_ema=False)


def _fsdp_reference(settings: StrategySettings) -> StrategySettings:
    return replace(settings, sp_size=1)


def _fsdp_critic(settings: StrategySettings) -> StrategySettings:
    own = replace(_own_type(settings), sp_size=1, tp_size=1, meta_init=False)
    return own if settings.tp_size == 1 else replace(own, shard_size=None)


def _zero_reference(settings: StrategySettings) -> StrategySettings:
    full = replace(_own_type(settings), zero_stage=0, sp_size=1)
    return replace(full, fsdp=True) if settings.zero_stage == 3 else full


def _parts_in_blocks(name: str, why: str) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.tp_fsdp",
        ("tp_size", name),
        lambda values: values["fsdp"] and values["tp_size"] > 1 and values[name] not in (None, False),
        why,
        f"leave {name} out, or --fsdp --tp_size 1",
    )


TENSOR_PARALLEL_FSDP = ParallelStrategy(
    name="tensor_parallel_fsdp",
    module="rft_dist.strategies.tensor_parallel_fsdp",
    chosen=lambda settings: settings.fsdp and settings.tp_size > 1,
    sharding=lambda settings: "fsdp",
    ranks_per_sample=lambda settings: settings.tp_size,
    shards_weights=lambda settings: True,
    collective_forward=True,
    float32_weights=True,
    critic=_fsdp_critic,
    refusals=(
        _parts_in_blocks(
            "shard_size", "parts are spread over all ranks that hold the same, which is what a shard_size would lower"
        ),
        _parts_in_blocks("fsdp_cpu_offload", "gradients of norms are summed over the ranks of a group, on the device"),
        _parts_in_blocks(
            "meta_init", "parts are compared with the whole model before they are spread, so that it is loaded whole"
        ),
    ),
)
FSDP = ParallelStrategy(
    name="fsdp",
    module="rft_dist.strategies.fsdp",
    chosen=lambda settings: settings.fsdp,
    sharding=lambda settings: "fsdp",
    shards_weights=lambda settings: True,
    collective_forward=True,
    float32_weights=True,
    reference=_fsdp_reference,
    critic=_fsdp_critic,
)
ZERO = ParallelStrategy(
    name="zero",
    module="rft_dist.strategies.zero.optimizer",
    chosen=lambda settings: settings.zero_stage > 0,
    sharding=lambda settings: ZERO_SHARDINGS[settings.zero_stage - 1],
    shards_weights=lambda settings: settings.zero_stage == 3,
    collective_forward=True,
    reference=_zero_reference,
    refusals=(
        StrategyRefusal(
            "strategy.two",
            ("fsdp", "zero_stage"),
            lambda values: values["fsdp"] and values["zero_stage"],
            "FSDP2 and DeepSpeed each spread the same weights; one of them does",
            "--fsdp, or --zero_stage 3 without it",
        ),
        StrategyRefusal(
            "strategy.overlap_stage",
            ("overlap_comm", "zero_stage"),
            lambda values: values["overlap_comm"] and values["zero_stage"] == 1,
            "DeepSpeed sums gradients after the backward pass at stage 1",
            "--zero_stage 2",
        ),
        StrategyRefusal(
            "strategy.fp16_zero",
            ("fp16", "zero_stage"),
            lambda values: values["fp16"] and values["zero_stage"],
            "DeepSpeed scales losses in its own way, and not on every device; FSDP2 spreads as much with ours",
            "--fsdp --fp16 (and leave zero_stage out)",
        ),
    ),
)
TENSOR_PARALLEL = ParallelStrategy(
    name="tensor_parallel",
    module="rft_dist.strategies.tensor_parallel",
    chosen=lambda settings: settings.tp_size > 1,
    sharding=lambda settings: "replicated",
    ranks_per_sample=lambda settings: settings.tp_size,
    shards_weights=lambda settings: True,
    refusals=(
        StrategyRefusal(
            "strategy.tp_blocks",
            ("tp_size", "zero_stage"),
            lambda values: values["tp_size"] > 1 and values["zero_stage"],
            "DeepSpeed lays whole matrices out; FSDP2 spreads the parts of one as ZeRO 3 spreads it whole",
            "--fsdp --tp_size {tp_size} (without zero_stage), or --zero_stage {zero_stage} --tp_size 1",
        ),
        StrategyRefusal(
            "strategy.tp_sp",
            ("tp_size", "sp_size"),
            lambda values: values["tp_size"] > 1 and values["sp_size"] > 1,
            "a group shares out the heads, or the tokens of a sequence",
            "--sp_size {sp_size} --fsdp --tp_size 1, or --tp_size {tp_size} --sp_size 1",
        ),
        StrategyRefusal(
            "strategy.tp_router",
            ("tp_size", "aux_loss_coef"),
            lambda values: values["tp_size"] > 1 and values["aux_loss_coef"],
            "mixtures of experts are not cut over ranks",
            "--fsdp --tp_size 1",
        ),
    ),
)
DATA_PARALLEL = ParallelStrategy(
    name="data_parallel",
    module="rft_dist.strategies.data_parallel",
    chosen=lambda settings: True,
    sharding=lambda settings: "replicated",
    reference=lambda settings: replace(settings, sp_size=1),
)

SEQUENCE_REFUSALS = (
    StrategyRefusal(
        "strategy.sp_mode",
        ("sp_mode", "sp_size"),
        lambda values: values["sp_mode"] != "auto" and values["sp_size"] == 1,
        "there is one rank a sequence, and nothing to share out",
        "--sp_size 2, or leave sp_mode out",
    ),
    StrategyRefusal(
        "strategy.ring_kernel",
        ("sp_mode", "flash_attn"),
        lambda values: values["sp_mode"] == "ring" and values["sp_size"] > 1 and values["flash_attn"],
        "in a ring the scores are computed tile by tile, and not by the package",
        "--sp_mode ulysses, or no --flash_attn",
    ),
    StrategyRefusal(
        "strategy.sp_router",
        ("sp_size", "aux_loss_coef"),
        lambda values: values["sp_size"] > 1 and values["aux_loss_coef"],
        "the routers' loss counts the experts of whole rows, which no rank has",
        "--sp_size 1",
    ),
)
"""Of sequences that groups of ranks share, which every strategy but tensor parallel can do beside its own."""

ZERO_SHARDINGS: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")
STRATEGIES: tuple[ParallelStrategy, ...] = (TENSOR_PARALLEL_FSDP, FSDP, ZERO, TENSOR_PARALLEL, DATA_PARALLEL)
"""All strategies; the first that the settings choose is taken."""


def choose_strategy(settings: StrategySettings) -> ParallelStrategy:
    """Return the strategy that the settings choose."""
    return next(strategy for strategy in STRATEGIES if strategy.chosen(settings))


def refusals(values: Values) -> Iterator[StrategyRefusal]:
    """Yield what the strategies refuse of these settings, each with its reason and the nearest that can."""
    for refusal in (*(refusal for strategy in STRATEGIES for refusal in strategy.refusals), *SEQUENCE_REFUSALS):
        if refusal.applies(values):
            yield refusal
