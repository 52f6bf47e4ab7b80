"""Number of LoRA weights, from the widths of a decoder alone; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rft_dist.planning.memory_estimate import DecoderSizes

_ALL = "all-linear"


def adapter_weights(values: Mapping[str, Any], sizes: DecoderSizes) -> tuple[int, list[str]]:
    """(weights that are trained in place of the model's, 0 without adapters; notes on layers that are not known here).

    r (in + out) of each layer that is adapted, and for dora its rows too. Experts that are one tensor have none.
    """
    rank = int(values.get("lora_rank") or 0)
    if not rank:
        return 0, []
    shapes = _shapes(sizes)
    names = adapted_layers(values, shapes)
    unknown = [name for name in names if name not in shapes]
    notes = [f"adapters of {', '.join(unknown)} are not counted: its width does not follow"] if unknown else []
    dora = values["lora_type"] == "dora"
    # a layer that is named twice is adapted once
    known = [shape for name in dict.fromkeys(names) if name in shapes for shape in shapes[name]]
    return sizes.layers * sum(rank * (wide + high) + (high if dora else 0) for wide, high in known), notes


def adapted_layers(values: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Return the names of the layers that get an adapter: those that are asked for, or all known ones."""
    asked = [part.strip() for part in str(values["target_modules"]).split(",") if part.strip()]
    return list(known) if asked in ([], [_ALL]) else [name.rpartition(".")[2] for name in asked]


def _shapes(sizes: DecoderSizes) -> dict[str, list[tuple[int, int]]]:
    """Name -> (in, out) of the linear layers of that name in one block."""
    width, query, keys = sizes.hidden, sizes.query_width, sizes.kv_width
    # routed experts may be one tensor, which gets no adapters; a shared expert is made of layers
    ffn = sizes.shared_ffn if sizes.num_experts else sizes.ffn
    shapes = {
        "q_proj": [(width, query)],
        "k_proj": [(width, keys)],
        "v_proj": [(width, keys)],
        "o_proj": [(query, width)],
    }
    if ffn:
        shapes |= {"gate_proj": [(width, ffn)], "up_proj": [(width, ffn)], "down_proj": [(ffn, width)]}
    if sizes.shared_gate:
        shapes["shared_expert_gate"] = [(width, 1)]
    return shapes
