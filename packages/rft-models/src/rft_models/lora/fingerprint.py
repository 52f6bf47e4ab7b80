"""Fingerprint of the base weights that adapters belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rft_models.lora.initial_values import Files

if TYPE_CHECKING:
    pass


def fingerprint(named: Iterable[tuple[str, Tensor]], files: Files | None = None) -> str:
    """32 hexadecimal digits over names, shapes, types and up to 64 evenly spaced elements of every tensor.

    `files`: where the elements are read, of tensors without memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        last = max(tensor.numel() - 1, 0)
        places = torch.linspace(0, last, min(tensor.numel(), _MOST_ELEMENTS), dtype=torch.float64).round().long()
        if files is None:
            found = tensor.detach().reshape(-1)[places.to(tensor.device)]
        else:
            found = _read_elements(name, tensor, places, files)
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|{found.double().cpu().tolist()}\n".encode())
    return digest.hexdigest()


_MOST_ELEMENTS = 64


def _read_elements(name: str, tensor: Tensor, places: Tensor, files: Files) -> Tensor:
    """Of a tensor's shape and type, the elements at places in row-major order."""
    indices = torch.stack(torch.unravel_index(places, tensor.shape), 1).tolist()
    found = [files.block(name, tuple(index), (1,) * tensor.ndim).reshape(-1) for index in indices]
    return torch.cat(found).to(tensor.dtype)
