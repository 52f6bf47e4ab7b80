"""Checks of the tensors that an equation is given: kind, type and shape, never a value, so no device is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import refuse


def check_mask(**masks: Tensor) -> None:
    """Refuse masks that are not bool: a float mask would be a weight in one equation and an index in another.

    Args:
        masks: [T] or of any shape, by the names of their arguments.

    Raises:
        InputError: for the first that is not.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            refuse(f"{name} must be bool, it is {mask.dtype}", why="a mask is true or false", do=f"{name}.bool()")


def check_vectors(**tensors: Tensor | None) -> None:
    """Refuse tensors that do not have one shape [T].

    Args:
        tensors: [T] each, by the names of their arguments; None is left out.

    Raises:
        InputError: if two shapes differ, or they are not those of vectors.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        refuse(
            f"every argument must have one shape [T]: {shapes}",
            why="tokens lie end to end; rows of [batch, time] are packed first (rft_algos.packed.padded_rows)",
        )


def check_group_ids(**ids: Tensor) -> None:
    """Refuse group ids that are no integers, such as the texts of the prompts.

    Args:
        ids: [N] each, by the names of their arguments.

    Raises:
        InputError: for the first that is not.
    """
    for name, values in ids.items():
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(
                f"{name} must be a tensor of integers, it is a {type(values).__name__}",
                why="sequences of one prompt are found by equal integers",
                do=f"torch.tensor([list({name}).index(i) for i in {name}])",
            )
        if values.is_floating_point() or values.dtype == torch.bool:
            refuse(f"{name} must be integers, they are {values.dtype}", why="equal ids are one group")
