"""Layout's part of the plan page: weights on the ranks, the engine, and rollouts ahead of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rft.build.engines import choose_engine
from rft.process.machine import choose_device
from rft.settings import RlSettings
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import choose_strategy

_EIGHT_BIT_CAPABILITY = (8, 9)
"""From Ada and Hopper on, GPUs have products of 8-bit floats."""


def engine_line(settings: RlSettings) -> str:
    choice = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    how = choice.kind.summary
    is_sharded = choose_strategy(settings.strategy).shards_weights(settings.strategy)
    if is_sharded and choice.shares_weights and choice.can.supports_sharded_policy:
        how = "in this process, its whole copy of the weights verified after every update"
    if asynchronous := async_rollouts_words(settings):
        how = f"{asynchronous}; their copies of the weights verified after every load"
    sleep = "gives its memory back between rollouts" if settings.engine.enable_engine_sleep else "keeps its memory"
    if settings.async_rollouts.max_staleness:
        sleep = "never sleeps"
    elif settings.engine.enable_engine_sleep and not choice.can_sleep:
        sleep = "stays awake, because vLLM's CPU build cannot sleep"
    rows = f"at most {settings.engine.engine_max_rows} sequences at once"
    eager = "; without CUDA graphs" if settings.engine.engine_enforce_eager else ""
    return f"{choice.name} ({choice.why}): {how}; {rows}; {sleep}{eager}{_eight_bits(settings)}"


def _eight_bits(settings: RlSettings) -> str:
    """Return the hint on 8-bit rounding of the engine's matrices, where it is possible and was not asked for."""
    device = choose_device(settings.model.device, 0)
    choice = choose_engine(settings.engine, device)
    if not choice.can.supports_fp8 or device == "cpu" or settings.engine.engine_fp8:
        return ""
    if torch.cuda.get_device_capability() < _EIGHT_BIT_CAPABILITY:
        return ""
    return "; this GPU multiplies 8-bit floats: --engine_fp8 --off_policy_correction tis would decode faster"


def async_rollouts_words(settings: RlSettings) -> str:
    """Return the engines' processes and the allowed staleness as text; empty where neither is set."""
    asynchronous, replicas = settings.async_rollouts, settings.replicas.engine_replicas
    line = f"{replicas} replicas in processes of their own" if replicas > 1 else ""
    if asynchronous.max_staleness:
        line = line or "1 process of its own"
        versions = "version" if asynchronous.max_staleness == 1 else "versions"
        how = "drawn whole by exactly that one, so that the run repeats to the bit"
        if not asynchronous.async_deterministic:
            how = "running samples go on under new weights; which token falls to which version depends on the clock"
        line += f"; rollouts run ahead: up to {asynchronous.max_staleness} {versions} older than what is trained, {how}"
    return line


def strategy_line(strategy: StrategySettings, *, bf16: bool) -> str:
    """Return the layout of weights, gradients and moments as text."""
    parts = choose_strategy(strategy).summary(strategy)
    return "; ".join([*parts, *_added_words(strategy, bf16=bf16), *_sharing_words(strategy)])


def _added_words(strategy: StrategySettings, *, bf16: bool) -> Iterator[str]:
    """Yield the plan's words on precision, offload and EMA, common to all strategies."""
    if strategy.meta_init:
        yield "every rank reads its blocks alone from the files"
    if strategy.fp16:
        yield "computed in float16 under a loss scale that adapts, stepped on in float32"
    elif strategy.use_mp_opt:
        yield "computed in bfloat16, stepped on in float32"
    elif bf16:
        yield "bfloat16 throughout"
    if strategy.amp:
        narrow = {"bf16": "in bfloat16", "fp16": "in float16 under a loss scale"}
        found = narrow.get(strategy.amp_dtype, "in bfloat16 or float16, by what the device can")
        yield f"products computed {found}, all else in float32"
    if strategy.adam_offload and not strategy.fsdp_cpu_offload:
        yield "moments in host memory"
    if strategy.enable_ema:
        yield f"a moving average of the weights, decay {strategy.ema_decay:g}"


def _sharing_words(strategy: StrategySettings) -> list[str]:
    """Return the plan's words on ranks that compute together."""
    sizes = choose_strategy(strategy).group_sizes(strategy)
    if sizes.matrix > 1:
        return [f"{sizes.matrix} ranks hold parts of every matrix and compute together (tensor parallel)"]
    if sizes.sequence > 1:
        how = {
            "auto": "by heads where those divide, else by a ring",
            "ulysses": "by heads",
            "ring": "by a ring",
        }[strategy.sp_mode]
        return [f"{sizes.sequence} ranks share each sequence, {how}"]
    return []
