"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on the device; to a GPU from page-locked memory, behind the work that the device has.

    A copy from other memory would let the host wait for all of that work. On a CPU it is the tensor itself.

    Example::

        places = to_device(torch.tensor([0, 2, 3]), hidden.device)
    """
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
