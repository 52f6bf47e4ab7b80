"""The parallel strategies: one row each, and the row that a run's settings choose. No torch is imported here.

A strategy is a module with a function `parallelize(model: ShardableModel, context: StrategyContext) ->
DistributedModel`, and a row of `STRATEGIES`. The rows are asked in order; the last one takes every run. What others
need to know of a run's layout is computed here from settings and row: batches, the memory estimate, the pages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.planning.run_layout import REPLICATED, RunLayout, Sharding
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


def _router_refusals(code: str, size: str, why: str, do: str) -> tuple[StrategyRefusal, ...]:
    """Refuse a group of ranks, by the setting of its size, beside each setting that trains routers."""

    def refusal(name: str) -> StrategyRefusal:
        return StrategyRefusal(code, (size, name), lambda values: values[size] > 1 and values.get(name), why, do)

    return tuple(map(refusal, ("aux_loss_coef", "router_z_loss_coef", "balance_bias_rate")))


class GroupSizes(NamedTuple):
    """The ranks that compute every sample together: all pairs of these two."""

    sequence: int
    """Ranks that share the tokens of a sample."""
    matrix: int
    """Ranks that hold the parts of a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStrategy:
    """One way to distribute weights, gradients and moments over ranks."""

    name: str
    module: str
    """The module whose `parallelize` distributes a model; imported at that moment."""
    chosen: Callable[[StrategySettings], bool]
    """Whether these settings choose it, where no row before it was chosen."""
    setting: str = ""
    """The setting that chooses it; empty = it runs where no other is chosen."""
    sharding: Callable[[StrategySettings], Sharding]
    """What of the training state its ranks divide among them."""
    summary: Callable[[StrategySettings], Sequence[str]]
    """Where weights, gradients and moments are, on the page that shows a run's plan."""
    sequence_setting: str = "sp_size"
    """The setting that counts the ranks that share the tokens of every sample."""
    matrix_setting: str = "tp_size"
    """The setting that counts the ranks that hold the parts of every matrix and compute every sample together."""
    options: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict[str, Callable[[Any], bool]])
    """Settings that act only with this strategy, and for which values of `setting` they do."""
    collective_forward: bool = False
    """Whether every forward and backward is an exchange, so that all ranks must make equally many."""
    reference: Callable[[StrategySettings], StrategySettings] = lambda settings: settings
    """Settings by which a model of the same size that is not trained is distributed."""
    critic: Callable[[StrategySettings], StrategySettings] = lambda settings: _full_copies(settings)
    """Settings by which a critic is distributed, whose weights are stepped on in their own type."""
    refusals: tuple[StrategyRefusal, ...] = ()

    def group_sizes(self, settings: StrategySettings) -> GroupSizes:
        """Return how many ranks compute every sample together."""
        return GroupSizes(getattr(settings, self.sequence_setting), getattr(settings, self.matrix_setting))

    def shards_weights(self, settings: StrategySettings) -> bool:
        """Return whether a rank keeps only a part of the weights between two forwards."""
        sharding = self.sharding(settings)
        return sharding.weights or sharding.expert_ranks > 1 or self.group_sizes(settings).matrix > 1

    def parallelize(self, model: ShardableModel, context: StrategyContext) -> DistributedModel:
        """Distribute a model in place, see `strategies.protocols`."""
        distribute: Callable[[ShardableModel, StrategyContext], DistributedModel] = importlib.import_module(
            self.module
        ).parallelize
        return distribute(model, context)


def _full_copies(settings: StrategySettings) -> StrategySettings:
    """Return settings under which every rank keeps full weights, of the type they are loaded in."""
    return replace(_own_type(settings), zero_stage=0, sp_size=1, tp_size=1, ep_size=1, adam_offload=False)


def _own_type(settings: StrategySettings) -> StrategySettings:
    """Return the settings without a narrower type for the forward, and without averages."""
    return replace(settings, use_mp_opt=False, fp16=False, amp=False, enable_ema=False)


def _fsdp_reference(settings: StrategySettings) -> StrategySettings:
    return replace(settings, sp_size=1)


def _fsdp_critic(settings: StrategySettings) -> StrategySettings:
    own = replace(_own_type(settings), sp_size=1, tp_size=1, meta_init=False)
    return own if settings.tp_size == 1 else replace(own, shard_size=None)


def _zero_reference(settings: StrategySettings) -> StrategySettings:
    full = replace(_own_type(settings), zero_stage=0, sp_size=1)
    return replace(full, fsdp=True) if settings.zero_stage == 3 else full


def _fsdp_summary(settings: StrategySettings, ranks: str) -> list[str]:
    over = f"groups of {settings.shard_size} ranks" if settings.shard_size else ranks
    words = [f"FSDP2: weights, gradients and moments in blocks over {over}; a layer is gathered while it computes"]
    return [*words, "blocks, gradients and moments in host memory"] if settings.fsdp_cpu_offload else words


def _zero_summary(settings: StrategySettings) -> list[str]:
    parts = ("moments", "moments and gradients", "moments, gradients and weights")[settings.zero_stage - 1]
    words = [f"DeepSpeed ZeRO {settings.zero_stage}: {parts} spread over all ranks"]
    if settings.zpg > 1:
        words.append(f"a second copy of the weights over every {settings.zpg} ranks")
    if settings.overlap_comm:
        words.append("gradients are exchanged during the backward pass")
    return words


FULLY_SHARDED = Sharding(weights=True, gradients=True, optimizer=True, float32_weights=True)
ZERO_SHARDINGS = (
    Sharding(optimizer=True),
    Sharding(optimizer=True, gradients=True),
    Sharding(optimizer=True, gradients=True, weights=True),
)
"""Of DeepSpeed's stages 1, 2 and 3."""


def _parts_in_blocks(name: str, why: str) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.tp_fsdp",
        ("tp_size", name),
        lambda values: values["fsdp"] and values["tp_size"] > 1 and values[name] not in (None, False),
        why,
        f"leave {name} out, or --fsdp --tp_size 1",
    )


def _amp_on_parts(name: str, on: Callable[[Values], Any], do: str) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.amp",
        ("amp", name),
        lambda values: values["amp"] and on(values),
        "autocast rounds the factors of torch's own products, and here the weights are held in another way",
        do,
    )


def _compile_on_parts(name: str, on: Callable[[Values], Any]) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.compile",
        ("compile", name),
        lambda values: values["compile"] == "on" and on(values),
        "the ranks exchange weights or states in each layer, and a compiled layer exchanges nothing",
        "leave compile out",
    )


def _muon_on_parts(name: str, on: Callable[[Values], Any]) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.muon",
        ("optimizer", name),
        lambda values: values.get("optimizer") == "muon" and on(values),
        "muon orthogonalises whole matrices, and a rank holds parts of them that FSDP2 alone gathers",
        f"--optimizer muon --fsdp without {name}, or --optimizer adamw",
    )


TENSOR_PARALLEL_FSDP = ParallelStrategy(
    name="tensor_parallel_fsdp",
    module="rft_dist.strategies.tensor_parallel_fsdp",
    chosen=lambda settings: settings.fsdp and settings.tp_size > 1,
    setting="fsdp",
    sharding=lambda settings: FULLY_SHARDED,
    summary=lambda settings: _fsdp_summary(settings, "the ranks that hold the same parts"),
    collective_forward=True,
    critic=_fsdp_critic,
    refusals=(
        _parts_in_blocks(
            "shard_size", "each part is sharded over all ranks that hold it, and shard_size would lower their number"
        ),
        _parts_in_blocks("fsdp_cpu_offload", "gradients of norms are summed over a tensor group on the device"),
        _parts_in_blocks(
            "meta_init", "the ranks compare the full weights before they cut them, so the full model is loaded"
        ),
    ),
)
FSDP = ParallelStrategy(
    name="fsdp",
    module="rft_dist.strategies.fsdp",
    chosen=lambda settings: settings.fsdp,
    setting="fsdp",
    sharding=lambda settings: FULLY_SHARDED,
    summary=lambda settings: _fsdp_summary(settings, "all ranks"),
    options={"shard_size": bool, "fsdp_cpu_offload": bool},
    collective_forward=True,
    reference=_fsdp_reference,
    critic=_fsdp_critic,
    refusals=(_compile_on_parts("fsdp", lambda values: values["fsdp"] and values["tp_size"] == 1),),
)
ZERO = ParallelStrategy(
    name="zero",
    module="rft_dist.strategies.zero.optimizer",
    chosen=lambda settings: settings.zero_stage > 0,
    setting="zero_stage",
    sharding=lambda settings: ZERO_SHARDINGS[settings.zero_stage - 1],
    summary=_zero_summary,
    options={"zpg": lambda stage: stage == 3, "overlap_comm": bool},
    collective_forward=True,
    reference=_zero_reference,
    refusals=(
        StrategyRefusal(
            "strategy.two",
            ("fsdp", "zero_stage"),
            lambda values: values["fsdp"] and values["zero_stage"],
            "FSDP2 and DeepSpeed both shard the weights; only one of them can",
            "--fsdp, or --zero_stage 3 without it",
        ),
        StrategyRefusal(
            "strategy.overlap_stage",
            ("overlap_comm", "zero_stage"),
            lambda values: values["overlap_comm"] and values["zero_stage"] == 1,
            "stage 1 exchanges gradients once a step, after the last backward pass: there is nothing to overlap",
            "--zero_stage 2",
        ),
        StrategyRefusal(
            "strategy.zpg_stage",
            ("zpg", "zero_stage"),
            lambda values: values["zpg"] > 1 and values["zero_stage"] in (1, 2),
            "a second copy of sharded weights needs sharded weights, which is stage 3",
            "--zero_stage 3 --zpg {zpg}",
        ),
        StrategyRefusal(
            "strategy.fp16_zero",
            ("fp16", "zero_stage"),
            lambda values: values["fp16"] and values["zero_stage"],
            "DeepSpeed scales losses itself, and not on every device; FSDP2 shards as much with RFT's scaler",
            "--fsdp --fp16 (and leave zero_stage out)",
        ),
        _amp_on_parts(
            "zero_stage",
            lambda values: values["zero_stage"] and not values["fsdp"],
            "--use_mp_opt --zero_stage {zero_stage}, or --amp --fsdp",
        ),
        _muon_on_parts("zero_stage", lambda values: values["zero_stage"] and not values["fsdp"]),
        _compile_on_parts("zero_stage", lambda values: values["zero_stage"] and not values["fsdp"]),
    ),
)
TENSOR_PARALLEL = ParallelStrategy(
    name="tensor_parallel",
    module="rft_dist.strategies.tensor_parallel",
    chosen=lambda settings: settings.tp_size > 1,
    setting="tp_size",
    sharding=lambda settings: REPLICATED,
    summary=lambda settings: ["gradients are summed once a step over the ranks that hold the same parts"],
    refusals=(
        StrategyRefusal(
            "strategy.tp_blocks",
            ("tp_size", "zero_stage"),
            lambda values: values["tp_size"] > 1 and values["zero_stage"],
            "DeepSpeed partitions whole matrices only; FSDP2 shards parts of them as ZeRO 3 shards whole ones",
            "--fsdp --tp_size {tp_size} (without zero_stage), or --zero_stage {zero_stage} --tp_size 1",
        ),
        StrategyRefusal(
            "strategy.tp_sp",
            ("tp_size", "sp_size"),
            lambda values: values["tp_size"] > 1 and values["sp_size"] > 1,
            "a group of ranks shares either the heads or the tokens of a sequence",
            "--sp_size {sp_size} --fsdp --tp_size 1, or --tp_size {tp_size} --sp_size 1",
        ),
        *_router_refusals(
            "strategy.tp_router", "tp_size", "tensor parallel does not cut mixtures of experts", "--fsdp --tp_size 1"
        ),
        _amp_on_parts(
            "tp_size", lambda values: values["tp_size"] > 1, "--use_mp_opt --tp_size {tp_size}, or --amp --fsdp"
        ),
        _muon_on_parts("tp_size", lambda values: values["tp_size"] > 1),
        _compile_on_parts("tp_size", lambda values: values["tp_size"] > 1),
    ),
)


def _with_experts(name: str, why: str, do: str, is_set: Callable[[Any], Any] = bool) -> StrategyRefusal:
    return StrategyRefusal(
        "strategy.ep_size",
        ("ep_size", name),
        lambda values: values["ep_size"] > 1 and is_set(values.get(name)),
        why,
        do,
    )


_CUTS_ANEW = "experts are divided whole among replicas, and this strategy divides all weights in another way"
EXPERT_PARALLEL = ParallelStrategy(
    name="expert_parallel",
    module="rft_dist.strategies.expert_parallel",
    chosen=lambda settings: settings.ep_size > 1,
    setting="ep_size",
    sharding=lambda settings: replace(REPLICATED, expert_ranks=settings.ep_size),
    summary=lambda settings: [
        f"{settings.ep_size} ranks hold the experts of each layer together (expert parallel), every rank all else; "
        "gradients are summed once a step"
    ],
    collective_forward=True,
    refusals=(
        _with_experts("fsdp", _CUTS_ANEW, "--ep_size {ep_size} without fsdp, or --fsdp --ep_size 1"),
        _with_experts("zero_stage", _CUTS_ANEW, "--ep_size {ep_size} without zero_stage, or --ep_size 1"),
        _with_experts(
            "tp_size",
            "tensor parallel does not cut mixtures of experts",
            "--ep_size {ep_size} --tp_size 1",
            lambda size: size > 1,
        ),
        _with_experts(
            "sp_size",
            "experts are counted over whole rows of each rank, and here no rank has a whole row",
            "--ep_size {ep_size} --sp_size 1, or --sp_size {sp_size} --ep_size 1",
            lambda size: size > 1,
        ),
        _with_experts(
            "lora_rank",
            "an adapter multiplies the experts of all ranks, and a rank holds its own alone",
            "leave lora_rank out, or --fsdp --ep_size 1",
        ),
        _muon_on_parts("ep_size", lambda values: values["ep_size"] > 1),
        _compile_on_parts("ep_size", lambda values: values["ep_size"] > 1),
    ),
)
DATA_PARALLEL = ParallelStrategy(
    name="data_parallel",
    module="rft_dist.strategies.data_parallel",
    chosen=lambda settings: True,
    sharding=lambda settings: REPLICATED,
    summary=lambda settings: ["every rank holds all; gradients are summed once a step"],
    reference=lambda settings: replace(settings, sp_size=1),
)

SEQUENCE_REFUSALS = (
    StrategyRefusal(
        "strategy.sp_mode",
        ("sp_mode", "sp_size"),
        lambda values: values["sp_mode"] != "auto" and values["sp_size"] == 1,
        "each sequence is on one rank, so there is nothing to share",
        "--sp_size 2, or leave sp_mode out",
    ),
    StrategyRefusal(
        "strategy.ring_kernel",
        ("sp_mode", "flash_attn"),
        lambda values: values["sp_mode"] == "ring" and values["sp_size"] > 1 and values["flash_attn"],
        "ring attention computes the scores tile by tile, without the flash-attn package",
        "--sp_mode ulysses, or no --flash_attn",
    ),
    *_router_refusals(
        "strategy.sp_router",
        "sp_size",
        "the routers' loss counts the experts of whole rows, and no rank has a whole row",
        "--sp_size 1",
    ),
)
"""Of sequences that groups of ranks share, which every strategy but tensor parallel can do beside its own."""

STRATEGIES: tuple[ParallelStrategy, ...] = (
    # both together before each alone, and last what every setting chooses
    TENSOR_PARALLEL_FSDP,
    FSDP,
    ZERO,
    TENSOR_PARALLEL,
    EXPERT_PARALLEL,
    DATA_PARALLEL,
)
"""All strategies; the first that the settings choose is taken."""

SHARDINGS: dict[str, StrategySettings] = {
    "replicated": StrategySettings(),
    "zero1": StrategySettings(zero_stage=1),
    "zero2": StrategySettings(zero_stage=2),
    "zero3": StrategySettings(zero_stage=3),
    "fsdp": StrategySettings(fsdp=True),
}
"""Words for a sharding that is planned in place of the settings' own, with settings that choose it."""


def choose_strategy(settings: StrategySettings) -> ParallelStrategy:
    """Return the strategy that the settings choose."""
    return next(strategy for strategy in STRATEGIES if strategy.chosen(settings))


def strategy_settings(values: Values) -> StrategySettings:
    """Return the strategy's settings among those of a run."""
    names = [each.name for each in fields(StrategySettings)]
    return StrategySettings(**{name: values[name] for name in names if name in values})


def sharding_settings(values: Values) -> list[str]:
    """Return the settings by which ranks keep a part of the weights, or exchange them in a forward; mostly none."""
    settings = strategy_settings(values)
    rows = [row for row in STRATEGIES if row.setting and row.chosen(settings)]
    names = [row.setting for row in rows if row.collective_forward or row.shards_weights(settings)]
    return list(dict.fromkeys(names))


def run_dims(settings: StrategySettings, world_size: int) -> ParallelDims:
    """Return the parallel dimensions of a run on so many ranks, on whatever machines those are."""
    return ParallelDims(1, world_size, *choose_strategy(settings).group_sizes(settings))


def run_layout(settings: StrategySettings, dims: ParallelDims, sharding: StrategySettings | None = None) -> RunLayout:
    """Return where the state of a run's models is, on ranks of these dimensions.

    `sharding`: settings that choose what the ranks divide among them, in place of the run's own.
    """
    chosen = settings if sharding is None else sharding
    strategy = choose_strategy(chosen)
    return RunLayout(
        dims=dims,
        shard_size=settings.shard_size,
        policy=strategy.sharding(chosen),
        reference=_sharding(strategy.reference(chosen)),
        critic=_sharding(strategy.critic(chosen)),
    )


def _sharding(settings: StrategySettings) -> Sharding:
    return choose_strategy(settings).sharding(settings)


def refusals(values: Values) -> Iterator[StrategyRefusal]:
    """Yield what the strategies refuse of these settings, each with its reason and the nearest that can."""
    for refusal in (*(refusal for strategy in STRATEGIES for refusal in strategy.refusals), *SEQUENCE_REFUSALS):
        if refusal.applies(values):
            yield refusal


def smaller_shares(values: Values, world_size: int, *, on_device: bool) -> Iterator[dict[str, Any]]:
    """Yield settings with which a rank's device holds less of the state, and the result of a run stays as it is.

    Args:
        values: the settings of a run.
        world_size: its ranks.
        on_device: whether there is a device whose memory is not that of the host.
    """
    if values.get("fsdp") or values.get("zero_stage"):
        return
    if world_size > 1:
        yield {"fsdp": True}
    if on_device and not values.get("adam_offload"):
        yield {"adam_offload": True}
