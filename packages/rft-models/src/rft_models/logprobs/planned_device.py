"""The device by whose limits the output head works: that of its tensors, or the one that a memory plan is made for.

A plan traces a step on tensors that have shapes and no values. It must form the logits in the pieces of the machine
that is planned for, and need not form every piece: all of them take the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from rft_models.logprobs.row_statistics import SlabSums

ItemT = TypeVar("ItemT")

_PLANNED: ContextVar[str] = ContextVar("planned_device", default="")
_TRACED_PIECES = 2
"""The first piece is written where the others are added, so that two show all there is."""
_HELD_SLABS = 8


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Work by the limits of a "cpu" or "cuda" device on tensors without values; pieces that are alike run twice."""
    token = _PLANNED.set(device_type)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_planned() -> bool:
    """Return whether tensors have shapes and no values, because a plan is made."""
    return bool(_PLANNED.get())


def device_type(tensor: Tensor) -> str:
    """Return the type of the device whose limits hold for this tensor."""
    return _PLANNED.get() or tensor.device.type


def traced(pieces: Sequence[ItemT]) -> Sequence[ItemT]:
    """Return all pieces; while a plan is made the first two."""
    return pieces[:_TRACED_PIECES] if is_planned() else pieces


def held_slab(slab: int, num_entries: int) -> int:
    """Return the vocabulary entries of a slab whose logits are held; while a plan is made eight hold all of them."""
    return max(slab, -(-num_entries // _HELD_SLABS)) if is_planned() else slab


class ShapesOfKernels:
    """The operations of `rft_kernels.ops` on tensors without values: what they allocate, and no arithmetic."""

    @staticmethod
    def slab_sums(products_RC: Tensor, targets_R: Tensor, start: int, **_: object) -> SlabSums:
        """Return [R] float32 sums."""
        del targets_R, start
        return _sums(products_RC, (products_RC.shape[0],))

    @staticmethod
    def fused_sums(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, **_: object) -> SlabSums:
        """Return [1, R] float32 sums; no logit is written."""
        del weight_VD, targets_R
        return _sums(hidden_RD, (1, hidden_RD.shape[0]))

    @staticmethod
    def slab_gradients(products_RC: Tensor, *_: object, **__: object) -> Tensor:
        """Return the products, which the gradient is written over."""
        return products_RC


def _sums(like: Tensor, size: tuple[int, ...]) -> SlabSums:
    highest, total, moment, target = (like.new_empty(size, dtype=torch.float32) for _ in range(4))
    return SlabSums(highest, total, moment, target, None)
