"""The matrix that a layer with an adapter computes with, and streams of tensors with adapters folded in.

    W' = W + s B A                                      LoRA (arXiv 2106.09685), rsLoRA (arXiv 2312.03732)
    W' = m (W + s B A) / |W + s B A|, row by row        DoRA (arXiv 2402.09353, equation 5)

Needs torch alone; a layer is peft's, known by its attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ADAPTER = "default"
"""Name of the only adapter, as peft has it inside a model; it is in no file."""

_PARTS = {
    "base_layer.weight": "base",
    f"lora_A.{ADAPTER}.weight": "down",
    f"lora_B.{ADAPTER}.weight": "up",
    f"lora_magnitude_vector.{ADAPTER}.weight": "length",
}


def is_adapted(module: Any) -> bool:
    """Return true where a module is one of peft's layers around one of the model's."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def base_layer(module: Any) -> Any:
    """Return the model's own layer: the module, or what the adapter is around."""
    return module.base_layer if is_adapted(module) else module


@torch.no_grad()
def merged_weight(
    base: Tensor, down_RK: Tensor, up_NR: Tensor, length_N: Tensor | None, scale: float, *, transposed: bool = False
) -> Tensor:
    """W' in the type of `base`, computed in float32 or more.

    Args:
        base: W [N, K], or [K, N] where `transposed` (GPT-2's layers).
        down_RK, up_NR: A and B.
        length_N: m of DoRA; None without.
        scale: s.
    """
    wide = torch.promote_types(base.dtype, torch.float32)  # updates are small beside the last bit of bfloat16
    base_NK = (base.t() if transposed else base).to(wide)
    merged_NK = torch.addmm(base_NK, up_NR.to(wide), down_RK.to(wide), alpha=scale)
    if length_N is not None:
        merged_NK *= (length_N.to(wide) / torch.linalg.norm(merged_NK, dim=1))[:, None]
    return (merged_NK.t().contiguous() if transposed else merged_NK).to(base.dtype)


def effective_weight(module: Any) -> Tensor:
    """Return the matrix that a linear layer multiplies with: its weight, or a new tensor with its adapter merged."""
    if not is_adapted(module):
        return module.weight
    lengths = module.lora_magnitude_vector
    return merged_weight(
        to_plain_tensor(module.base_layer.weight),
        module.lora_A[ADAPTER].weight,
        module.lora_B[ADAPTER].weight,
        lengths[ADAPTER].weight if ADAPTER in lengths else None,
        float(module.scaling[ADAPTER]),
        transposed=bool(getattr(module, "fan_in_fan_out", False)),
    )


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor detached from its graph; one in 4 bits is dequantized."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor.detach()
    import bitsandbytes  # pyright: ignore[reportMissingImports]

    return bitsandbytes.functional.dequantize_4bit(tensor.data, state)  # pyright: ignore


@dataclass(frozen=True, slots=True)
class MergeFacts:
    """Facts of a layer that merging its adapter needs, besides the tensors."""

    scale: float
    has_length: bool
    transposed: bool


def merge_into_base(named: Iterable[tuple[str, Tensor]], layers: dict[str, MergeFacts]) -> Iterator[tuple[str, Tensor]]:
    """Turn the stream of a model with adapters into that of a model without: file names, adapters folded in.

    A matrix is kept until its adapter has come, which follows it; everything else goes through.

    Args:
        named: (name, whole tensor) as the model with adapters names them, in its order.
        layers: what has an adapter, by the name of the layer.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        path, part = split_name(name, layers)
        if path is None:
            yield name, tensor
        elif part not in _PARTS.values():
            yield f"{path}.{part}", tensor
        else:
            parts = waiting.setdefault(path, {})
            parts[part] = tensor
            if len(parts) == (4 if layers[path].has_length else 3):
                yield f"{path}.weight", _merged(waiting.pop(path), layers[path])
    assert not waiting, f"adapters of which a part did not come: {sorted(waiting)[:3]}"


def split_name(name: str, layers: dict[str, MergeFacts]) -> tuple[str | None, str]:
    """(the adapted layer or None, "base", "down", "up", "length", or what stands behind the layer's name in files)."""
    for end, part in _PARTS.items():
        if name.endswith(f".{end}") and (path := name[: -len(end) - 1]) in layers:
            return path, part
    # whatever else the base layer has, such as a bias, keeps the name that it has in files
    path, separator, rest = name.rpartition(".base_layer.")
    return (path, rest) if separator and path in layers else (None, name)


def is_adapter_tensor(name: str, layers: dict[str, MergeFacts]) -> bool:
    """Return true where a tensor belongs to an adapter and not to the model."""
    return split_name(name, layers)[1] in ("down", "up", "length")


def _merged(parts: dict[str, Tensor], facts: MergeFacts) -> Tensor:
    base, down_RK, up_NR = parts["base"], parts["down"], parts["up"]
    return merged_weight(base, down_RK, up_NR, parts.get("length"), facts.scale, transposed=facts.transposed)
