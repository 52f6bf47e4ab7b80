"""Fingerprint of the base weights that adapters belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from rft_models.lora.initial_values import Files

_MOST_ELEMENTS = 64


def fingerprint(named: Iterable[tuple[str, Tensor]], files: Files | None = None) -> str:
    """32 hexadecimal digits over names, shapes, types and up to 64 evenly spaced elements of every tensor.

    `files`: where the elements are read, of tensors without memory.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        last = tensor.numel() - 1
        # in float64: float32 does not tell elements above 16 million apart
        indices = torch.linspace(0, last, min(tensor.numel(), _MOST_ELEMENTS), dtype=torch.float64).round().long()
        if files is None:
            elements = tensor.detach().reshape(-1)[indices.to(tensor.device)]
        else:
            elements = _read_elements(name, tensor, indices, files)
        # as numbers in text: neither the device nor the order of bytes shows in the fingerprint
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|{elements.double().cpu().tolist()}\n".encode())
    return digest.hexdigest()


def _read_elements(name: str, tensor: Tensor, flat: Tensor, files: Files) -> Tensor:
    """Read the elements of a tensor at flat indices in row-major order; `tensor` gives the shape and the type."""
    indices = torch.stack(torch.unravel_index(flat, tensor.shape), 1).tolist()
    elements = [files.block(name, tuple(index), (1,) * tensor.ndim).reshape(-1) for index in indices]
    return torch.cat(elements).to(tensor.dtype)
