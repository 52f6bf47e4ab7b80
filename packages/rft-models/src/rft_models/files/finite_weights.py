"""Weights that are numbers: a NaN or an infinity is refused with the tensor and the file that hold it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rft_core.errors import DataError

_WHY = "every response of a model with such a weight would be noise, and every loss NaN"


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite; one pass without memory of its own. Codes of 4 or 8 bits pass."""
    if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.is_meta or not tensor.numel():
        return True
    # both ends are NaN where any element is; `isfinite` would be as large as the tensor, and 30 times slower on a CPU
    low, high = tensor.detach().aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def require_finite(named: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Refuse loaded weights of which one is not finite.

    Args:
        named: (name in the model, tensor) of each weight.
        directory: where they were loaded from; its files are read again only to name the one at fault.

    Raises:
        DataError: names tensor and file.
    """
    for name, tensor in named:
        if is_finite(tensor):
            continue
        for file in sorted(directory.glob("*.safetensors")):
            _refuse_in(file)
        # the files are sound, so the type of the weights is too narrow
        raise DataError(
            code="models.weights_overflow",
            what=f"the tensor {name} has values beyond those of {tensor.dtype}",
            where=str(directory),
            why=_WHY,
            do="--bf16 false",
        )


def not_finite(name: str, tensor: Tensor, file: Path) -> DataError:
    """Return the error that a tensor of a file holds NaN or infinite values."""
    counts = {"NaN": int(tensor.isnan().sum()), "infinite": int(tensor.isinf().sum())}
    found = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return DataError(
        code="models.weights_not_finite",
        what=f"the tensor {name} in {file.name} has {found} among the {tensor.numel():,} values that were read",
        where=str(file),
        why=_WHY,
        do=f"copy {file.name} of the model again; where it was saved by a run that diverged, use an earlier checkpoint",
    )


def _refuse_in(path: Path) -> None:
    """Raise for the first tensor of a file that is not finite."""
    with safe_open(str(path), framework="pt") as opened:
        file: Any = opened
        for name in file.keys():  # noqa: SIM118 - the object is no mapping
            tensor = file.get_tensor(name)
            if not is_finite(tensor):
                raise not_finite(name, tensor, path)
