"""Checks of the tensors that an equation is given: kind, type and shape, never a value, so no device is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.input_checks import refuse


def check_tensors(**values: object) -> None:
    """Refuse what is no tensor, such as a list or an array.

    Args:
        values: tensors of any shape, by the names of their arguments.

    Raises:
        InputError: for the first that is something else.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            kind = "None" if value is None else f"a {type(value).__name__}"
            refuse(f"{name} must be a tensor, it is {kind}", do="" if value is None else f"torch.as_tensor({name})")


def check_alike(**tensors: Tensor) -> None:
    """Refuse tensors that an equation of single tokens would broadcast against each other.

    [B] beside [B, L] would be read as one number a position, which fails only where B is not L.

    Args:
        tensors: [T], or of any one shape, by the names of their arguments; an axis may be 1 where all are the same.

    Raises:
        InputError: if their shapes differ.
    """
    check_tensors(**tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    num_axes = {len(shape) for shape in shapes.values()}
    if len(num_axes) > 1 or any(len({n for n in sizes if n != 1}) > 1 for sizes in zip(*shapes.values(), strict=True)):
        refuse(
            f"every argument must have one shape: {shapes}",
            why="each token has its own numbers; one a row is spread over the row first",
            do="advantages[:, None]" if {1, 2} == num_axes and len(shapes.get("advantages_T", ())) == 1 else "",
        )


def check_responses(**tensors: Tensor) -> None:
    """Refuse tensors that are not one number a response.

    Args:
        tensors: [B] each, by the names of their arguments.

    Raises:
        InputError: if two shapes differ, or they are not [B].
    """
    check_tensors(**tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        refuse(
            f"every argument must have one shape [B]: {shapes}",
            why="one number a response: log-probs are summed over its tokens first, without prompt and padding",
            do="(logprobs * mask).sum(1)" if any(len(shape) == 2 for shape in shapes.values()) else "",
        )


def check_mask(**masks: Tensor) -> None:
    """Refuse masks that are not bool: a float mask would be a weight in one equation and an index in another.

    Args:
        masks: [T] or of any shape, by the names of their arguments.

    Raises:
        InputError: for the first that is not.
    """
    check_tensors(**masks)
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
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_tensors(**given)
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
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
