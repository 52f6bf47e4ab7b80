"""Memory of the inference engine on a rank, by formula, beside what the trainer holds; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.decoder_sizes import decodes_joined
from rft.planning.lora_memory import adapted_layers
from rft_dist.planning.memory_estimate import (
    GIB,
    DecoderSizes,
    MemoryTerm,
    TrainingMemoryConfig,
    cache_bytes_of_token,
)
from rft_engine.registry import EngineKind, engine_kind


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Memory terms that an engine adds to a plan, and notes on what they leave open."""

    terms: list[MemoryTerm]
    notes: list[str]


def sleeps(values: Mapping[str, Any]) -> bool:
    """Return True where the engine gives memory back while the policy trains; one that runs ahead stays awake."""
    return bool(values.get("enable_engine_sleep", True)) and not values.get("max_staleness")


def engine_parts(
    values: Mapping[str, Any], sizes: DecoderSizes, run: TrainingMemoryConfig, gpu_memory: int | None
) -> EngineParts:
    """Return what the engine of a command holds, but for the keys and values of one in this process.

    Args:
        values: the settings of the run.
        sizes: widths of the model.
        run: what the trainer holds.
        gpu_memory: GiB of each GPU, where they are known.
    """
    if "engine_type" not in values:
        return EngineParts([], [])
    kind, notes = engine_kind(values["engine_type"]), list[str]()
    replicas = int(values.get("engine_replicas") or 1)
    if replicas > 1:
        notes.append(f"{replicas} engines a rank are planned for, and the memory of one is counted")
    if kind.can.reserves_memory:
        parts = _own_process(kind, values, sizes, run, gpu_memory)
        return EngineParts(parts.terms, notes + parts.notes)
    return EngineParts(_this_process(kind, values, sizes, run), notes)


def _this_process(
    kind: EngineKind, values: Mapping[str, Any], sizes: DecoderSizes, run: TrainingMemoryConfig
) -> list[MemoryTerm]:
    """Return P w of a whole copy where no rank has one to share, else the joined matrices beside the model's own."""
    # asleep it drops its cache alone, so that both stay while the policy trains
    if run.layout.policy.weights or run.layout.dims.tp_size > 1:
        size = run.compute_bytes
        return [MemoryTerm("engine's copy", sizes.parameters * size, f"{sizes.parameters:,} x {size} bytes")]
    if not kind.can.joins_matrices or sizes.num_experts or not decodes_joined(values["pretrain"]):
        return []
    count = joined_weights(values, sizes)
    return [MemoryTerm("joined matrices", count * run.weight_bytes, f"{count:,} x {run.weight_bytes} bytes")]


def joined_weights(values: Mapping[str, Any], sizes: DecoderSizes) -> int:
    """L (h (q + 2 k) + 2 h f): queries, keys and values as one matrix, gate and up as one.

    Where their layers have adapters, also the attention's output (q h) and the last of the block (f h), folded in.
    """
    width = sizes.hidden
    block = width * (sizes.query_width + 2 * sizes.kv_width) + 2 * width * sizes.ffn
    if values.get("lora_rank"):
        shapes = {"o_proj": sizes.query_width * width, "down_proj": sizes.ffn * width}
        names = adapted_layers(values, shapes)
        block += sum(count for name, count in shapes.items() if name in names)
    return sizes.layers * block


def _own_process(
    kind: EngineKind,
    values: Mapping[str, Any],
    sizes: DecoderSizes,
    run: TrainingMemoryConfig,
    gpu_memory: int | None,
) -> EngineParts:
    """Return the share of the GPU that the engine takes, and the host's copy of its weights while it sleeps."""
    share, ranks = values.get("engine_mem_util"), int(values["engine_tp_size"])
    size = 1 if values.get("engine_fp8") else run.compute_bytes
    weights = -(-sizes.parameters * size // ranks)
    terms, notes = list[MemoryTerm](), list[str]()
    if share is None or gpu_memory is None:
        needed = "--gpu_memory" if share is not None else "--engine_mem_util and --gpu_memory"
        notes.append(
            f"{kind.name} holds its own copy of the weights ({weights / GIB:.1f} GiB) and its cache within "
            f"--engine_mem_util of the GPU, which is counted with {needed}"
        )
    else:
        taken = int(share * gpu_memory * GIB)
        token = -(-cache_bytes_of_token(sizes, run.compute_bytes) // ranks)
        fitting = max(taken - weights, 0) // (token * max(run.cache_tokens, 1))
        about = (
            f"{weights / GIB:.1f} GiB of weights leave room for at most {fitting:,} sequences of {run.cache_tokens:,}"
        )
        formula = f"{share:g} x {gpu_memory} GiB; {about} tokens"
        terms.append(MemoryTerm("engine's share", taken, formula, in_training=not sleeps(values)))
        if not fitting:
            notes.append(
                f"engine_mem_util = {share:g} of {gpu_memory} GiB leaves {kind.title} no room for one sequence"
            )
    if sleeps(values):
        formula = f"{sizes.parameters:,} x {size} bytes" + (f" / {ranks} ranks" if ranks > 1 else "")
        terms.append(MemoryTerm("engine's copy asleep", weights, formula, on_host=True))
    return EngineParts(terms, notes)
