"""Checks of what an equation is given, which stay under `python -O`. Torch-free.

`InputError` is the error of every check in this package: one of `rft_core.errors`, and a ValueError.
"""

from __future__ import annotations

import math
import sys
from typing import NoReturn

from rft_core.errors import OptionsError

_OF_A_RECORD = "__post_init__"
"""Where a record checks its fields: its name is that of the record."""


class InputError(OptionsError, ValueError):
    """Input that an equation cannot take: a shape, a type, a number outside its range.

    Its `what` names the argument and what it must be, rule and remedy at once; `why` and `do` stand where there is more
    to say.
    """


def refuse(what: str, *, why: str = "", do: str = "") -> NoReturn:
    """Raise the error of an input, naming the function that was given it (no tensors).

    Args:
        what: the argument, what it is and what it must be.
        why: the reason for it, where what must be does not say it.
        do: one expression that would do, where there is one.

    Raises:
        InputError: always.
    """
    raise InputError(code="algorithm.input", what=what, where=_caller(), why=why, state="", do=do)


def check_positive(**values: float | None) -> None:
    """Refuse numbers that are not positive, NaN among them; infinity is allowed (no tensors).

    Args:
        values: numbers by the names of their arguments; None is left out.

    Raises:
        InputError: for the first that is not.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            refuse(f"{name} must be positive, it is {value}")


def check_not_negative(**values: float | None) -> None:
    """Refuse numbers below 0, and NaN (no tensors).

    Args:
        values: numbers by the names of their arguments; None is left out.

    Raises:
        InputError: for the first that is.
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            refuse(f"{name} must be 0 or more, it is {value}")


def check_unit(**values: float | None) -> None:
    """Refuse numbers outside [0, 1], such as a discount or a lambda cannot be (no tensors).

    Args:
        values: numbers by the names of their arguments; None is left out.

    Raises:
        InputError: for the first that is.
    """
    for name, value in values.items():
        if value is not None and not 0 <= value <= 1:
            refuse(f"{name} must be in [0, 1], it is {value}")


def check_clip(*, clip_low: float | None, clip_high: float | None) -> None:
    """Refuse bounds of a ratio that are not 1 - clip_low < 1 < 1 + clip_high with clip_low at most 1 (no tensors).

    A bound itself in place of its distance from 1, such as 0.8 and 1.2, is not seen: both are in range.

    Args:
        clip_low: how far below 1 the ratio may go, in [0, 1]; None for no bound.
        clip_high: how far above 1 it may go, 0 or more; None for no bound.

    Raises:
        InputError: for the first that is out of range.
    """
    check_unit(clip_low=clip_low)
    check_not_negative(clip_high=clip_high)


def check_bounds(low: float, high: float) -> None:
    """Refuse bounds of a ratio that nothing can lie between (no tensors).

    Args:
        low: lower bound, 0 or more and finite.
        high: upper bound, not below it.

    Raises:
        InputError: if they are not.
    """
    check_not_negative(low=low)
    if not (low <= high and low < math.inf):
        refuse(f"low = {low} must not be above high = {high}")


def _caller() -> str:
    """The public function, outside of the modules of checks, that was checking."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").endswith("_checks")
        or (frame.f_code.co_name.startswith(("_", "<")) and frame.f_code.co_name != _OF_A_RECORD)
    ):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname.removesuffix(f'.{_OF_A_RECORD}')}"
