"""Tensors to Python lists, typed: torch's own `tolist` is annotated as a bare `list`."""

from __future__ import annotations

from torch import Tensor


def to_ints(tensor_N: Tensor) -> list[int]:
    """[N] of any integer type."""
    return tensor_N.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def to_floats(tensor_N: Tensor) -> list[float]:
    """[N] of any floating type."""
    return tensor_N.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
