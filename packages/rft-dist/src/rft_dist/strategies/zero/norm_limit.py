"""Upper bound of the gradient norm inside of DeepSpeed's step, which learns the norm there and nowhere else.

Each of its optimizers asks `is_invalid_grad_norm` of the norm over all ranks before it changes a weight, and drops the
step where the answer is yes. While a bound holds, the answer is yes for larger norms too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rft_core.errors import PreflightError, install_command

_QUESTION = "is_invalid_grad_norm"


@dataclass(slots=True)
class SeenNorm:
    """The norm of a step, as DeepSpeed computed it."""

    norm: float = math.nan
    """Of the gradient of the loss, without the loss scale; NaN where no norm was asked of."""
    too_large: bool = False
    """Whether the step was refused for its norm alone."""


@contextmanager
def refuse_above(optimizer: Any, largest: float) -> Generator[SeenNorm]:
    """Let DeepSpeed's optimizer refuse steps with a norm above `largest` while the context is open.

    A step that is refused so leaves the loss scale of float16 as it is.

    Raises:
        PreflightError: this version of DeepSpeed does not ask.
    """
    module = sys.modules[type(optimizer).__module__]
    original: Callable[[Any], bool] | None = getattr(module, _QUESTION, None)
    if original is None:
        raise _not_asked()
    seen = SeenNorm()

    def is_refused(norm: Any) -> bool:
        if original(norm):
            return True
        seen.norm = float(norm) / float(getattr(optimizer, "loss_scale", 1.0))
        seen.too_large = seen.norm > largest
        return seen.too_large

    scaled: Callable[[bool], None] | None = getattr(optimizer, "_update_scale", None)

    def update_scale(has_overflow: bool = False) -> None:
        if scaled is not None and not seen.too_large:
            scaled(has_overflow)

    setattr(module, _QUESTION, is_refused)
    if scaled is not None:
        optimizer._update_scale = update_scale  # its own method would take the norm for an overflow
    try:
        yield seen
    finally:
        setattr(module, _QUESTION, original)
        if scaled is not None:
            del optimizer._update_scale


def _not_asked() -> PreflightError:
    return PreflightError(
        code="zero.norm",
        what="this version of deepspeed does not look at the gradient norm before it changes the weights",
        where="--max_norm_spike beside --zero_stage",
        why="an update whose norm jumps is refused inside of DeepSpeed's step",
        do=f"{install_command('deepspeed')} --upgrade-package deepspeed, or leave --max_norm_spike out",
    )
