"""What adapters share: the outcome of a case, and the shapes that trainers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Case = Mapping[str, Any]
Compute = Callable[[Case, torch.dtype], dict[str, Any]]
Key = tuple[str, str]
"""(kind, name) of an equation."""


class Unfit(Exception):
    """The trainer has the equation, but no place for what this case puts in."""


def numbers(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A vector; None is NaN."""
    return torch.tensor([math.nan if v is None else v for v in values], dtype=dtype)


def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """[B, T] rows side by side, padded on the right; None is NaN."""
    fill = bool(fill) if dtype == torch.bool else fill
    width = max(len(row) for row in rows)
    return torch.stack([numbers([*row, *[fill] * (width - len(row))], dtype) for row in rows])


def unpadded(values: Tensor, rows: Sequence[Sequence[Any]]) -> list[list[float]]:
    """The inverse of `padded` for rows of these lengths."""
    return [line[: len(row)].tolist() for line, row in zip(values.detach(), rows, strict=True)]


def at_mask(values: Tensor, case: Case) -> list[list[float]]:
    """[B, T] values of a case's tokens, 0 where masked: what a trainer leaves there is masked later."""
    mask = case["inputs"]["mask"]
    return unpadded(torch.where(padded(mask, torch.bool), values, 0.0), mask)


def regular_groups(groups: Sequence[int]) -> tuple[list[int], int]:
    """The places of the sequences with groups side by side, and the one size of all groups."""
    order = sorted(range(len(groups)), key=lambda i: groups[i])
    sizes = {groups.count(group) for group in groups}
    if len(sizes) > 1:
        raise Unfit("all groups must have one size")
    return order, sizes.pop()


def leaf(values: Tensor) -> Tensor:
    """The same numbers as a leaf that gathers a gradient."""
    return values.detach().clone().requires_grad_()


def slope(loss: Tensor, variable: Tensor) -> Tensor:
    """The gradient, 0 where the variable has no part in the loss."""
    if not loss.requires_grad:
        return torch.zeros_like(variable)
    (found,) = torch.autograd.grad(loss.sum(), variable, retain_graph=True, allow_unused=True)
    return torch.zeros_like(variable) if found is None else found


def outcome(
    compute: Mapping[Key, Compute], refused: Mapping[Key, str], case: Case, dtype: torch.dtype
) -> dict[str, Any]:
    """What came of a case: results, or why there are none."""
    key = (case["kind"], case["name"])
    if key not in compute:
        return {"status": "absent", "why": refused.get(key, "not implemented")}
    return attempt(compute[key], case, dtype)


def attempt(function: Compute, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """What came of one function on a case."""
    try:
        found = function(case, dtype)
    except Unfit as reason:
        return {"status": "unfit", "why": str(reason)}
    except Exception as error:  # noqa: BLE001 - a trainer that raises is a result of the table
        first = (str(error).splitlines() or [""])[0]
        return {"status": "raises", "why": f"{type(error).__name__}: {first[:160]}"}
    return {"status": "computed", "got": {name: _plain(value) for name, value in found.items()}}


def _plain(value: Any) -> Any:
    """Numbers for JSON, which has no NaN: those are None, infinities are text."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    number = float(value.detach()) if isinstance(value, Tensor) else float(value)
    return None if math.isnan(number) else number if math.isfinite(number) else str(number)
