"""What is asked of the head's inputs before any product."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_models.head_sums import IGNORED


def of_one_type(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All in the type of the matrix, or of autocast where that is on."""
    device = hidden_RD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
    return hidden_RD.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)


def counted_rows(targets_R: Tensor) -> Tensor | None:
    """[N] the rows with a target, or None where all have one."""
    counted_R = targets_R != IGNORED
    return None if bool(counted_R.all()) else counted_R.nonzero()[:, 0]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
