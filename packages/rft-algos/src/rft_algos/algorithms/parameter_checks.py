"""Checks of the parameters of components: words and ranges. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rft_algos.input_checks import InputError
from rft_core.nearest_names import nearest_names

Flags = Mapping[str, Mapping[str, Any]]
"""Words of a command that mean a component, each with the parameters that the word sets."""


def check_choice(field: str, value: str, allowed: tuple[str, ...], *, condition: str = "") -> None:
    """Refuse a word that is not among those allowed (no tensors).

    Args:
        field: the field, for the message.
        value: what was given.
        allowed: what may be given.
        condition: what restricts it, such as "with rewards of steps"; empty for none.

    Raises:
        InputError: with the nearest allowed word.
    """
    if value in allowed:
        return
    nearest = (nearest_names(value, allowed, count=1, cutoff=0.0) or [allowed[0]])[0]
    raise InputError(
        code="algorithm.unknown_choice",
        what=f"{field} = {value!r}" + (f" {condition}" if condition else ""),
        where=f"{field} of the algorithm",
        why=f"it must be one of {', '.join(allowed)}",
        do=f'{field}="{nearest}"',
    )


def check_range(field: str, value: float | None, valid: bool, rule: str, remedy: str) -> None:
    """Refuse a number outside its range (no tensors).

    Args:
        field: the field, for the message.
        value: what was given.
        valid: whether it is in range.
        rule: what it must be.
        remedy: an assignment that would do.

    Raises:
        InputError: if it is not valid.
    """
    if valid:
        return
    raise InputError(
        code="algorithm.out_of_range",
        what=f"{field} = {value}",
        where=f"{field} of the algorithm",
        why=f"it must be {rule}",
        do=remedy,
    )


def check_positive(**values: float) -> None:
    """Refuse numbers that are not positive and finite (no tensors).

    Args:
        values: fields by name.

    Raises:
        InputError: for the first that is not.
    """
    for field, value in values.items():
        check_range(field, value, 0 < value < math.inf, "positive", f"{field}=1.0")


def check_share(**values: float) -> None:
    """Refuse numbers outside (0, 1) (no tensors).

    Args:
        values: fields by name.

    Raises:
        InputError: for the first that is not.
    """
    for field, value in values.items():
        check_range(field, value, 0 < value < 1, "between 0 and 1", f"{field}=0.2")


def check_discount(**values: float) -> None:
    """Refuse numbers outside [0, 1] (no tensors).

    Args:
        values: fields by name.

    Raises:
        InputError: for the first that is not.
    """
    for field, value in values.items():
        check_range(field, value, 0 <= value <= 1, "from 0 to 1", f"{field}=1.0")
