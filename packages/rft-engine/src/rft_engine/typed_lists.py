"""Tensors to Python lists, typed: torch's own `tolist` is annotated as a bare `list`."""

from __future__ import annotations

from torch import Tensor


def to_ints(tensor_N: Tensor) -> list[int]:
    """Return the values of an [N] tensor of any integer type."""
    return tensor_N.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def to_floats(tensor_N: Tensor) -> list[float]:
    """Return the values of an [N] tensor of any floating type."""
    return tensor_N.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
