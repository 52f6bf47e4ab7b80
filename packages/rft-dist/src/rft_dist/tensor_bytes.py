"""The bytes of a tensor as they are in memory, for hashing and for files."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes in row-major order; a copy only where the tensor is elsewhere or not contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data
