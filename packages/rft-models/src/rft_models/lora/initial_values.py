"""Initial values of adapters, also where the base weights are still in their files.

A model made without memory (`load_on_meta`) has none for its adapters either: their initial values are kept here, and
are read block by block beside the weights of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft_models.lora.merge import ADAPTER, to_plain_tensor

_META = torch.device("meta")


class Files(Protocol):
    """Weights that are read a block at a time, see `safetensors_reader.WeightFiles`."""

    def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor: ...

    def close(self) -> None: ...


@torch.no_grad()
def initialize(name: str, module: Any, key: int, files: Files | None) -> dict[str, Tensor]:
    """Give a layer's adapter its first values: A from the key, B zero, DoRA's lengths those of the matrix.

    They are float32, or wider where the matrix is. A is uniform in +-1 / sqrt(in), as peft draws it.

    Args:
        name: of the layer in the model.
        module: peft's layer.
        key: what A follows from.
        files: where the matrix is, when the layer has no memory; None = in the layer.

    Returns:
        The values by the model's names where there is no memory for them; else nothing, they are in place.
    """
    has_length, weight = ADAPTER in module.lora_magnitude_vector, module.base_layer.weight
    # only the lengths of DoRA depend on the values of the matrix: without them no file is read
    base = to_plain_tensor(weight) if files is None else _read(name, weight, files) if has_length else weight
    wide = torch.promote_types(base.dtype, torch.float32)
    down, up = module.lora_A[ADAPTER], module.lora_B[ADAPTER]
    generator = torch.Generator().manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    # in float32 on the CPU whatever the model is in, so that a seed always gives the same adapter
    drawn = torch.rand(down.weight.shape, generator=generator, dtype=torch.float32) * 2 - 1
    values = {
        f"lora_A.{ADAPTER}.weight": (drawn / down.weight.shape[1] ** 0.5).to(wide),
        f"lora_B.{ADAPTER}.weight": torch.zeros(up.weight.shape, dtype=wide),
    }
    if has_length:
        rows = (base.t() if getattr(module, "fan_in_fan_out", False) else base).to(wide)
        values[f"lora_magnitude_vector.{ADAPTER}.weight"] = torch.linalg.norm(rows, dim=1)
    device = weight.device if files is None else _META
    for own, value in values.items():
        owner = module.get_submodule(own.removesuffix(".weight"))
        owner.weight = nn.Parameter(value.to(device))
    for own, parameter in module.named_parameters():
        parameter.requires_grad_(own.startswith("lora_"))
    return {} if files is None else {f"{name}.{own}": value for own, value in values.items()}


def _read(name: str, weight: Tensor, files: Files) -> Tensor:
    return files.block(f"{name}.weight", (0,) * weight.ndim, tuple(weight.shape)).to(weight.dtype)


class PendingLoraWeights:
    """The files under a model with adapters, and the values of these: blocks of both by the model's names."""

    def __init__(self, files: Files, waiting: dict[str, Tensor]) -> None:
        """Combine both sources; `waiting` is cleared when the files are closed."""
        self._files, self._waiting = files, waiting

    def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read `shape` elements from `start` on."""
        if name not in self._waiting:
            return self._files.block(name.replace(".base_layer.", "."), start, shape)
        slices = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        return self._waiting[name][slices]

    def close(self) -> None:
        """Close the files and drop the adapters' values."""
        self._files.close()
        self._waiting.clear()
