"""Location of checkpoint tensors among the parameters of an engine that fuses some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rft_engine.weight_sync.fingerprints import Fingerprint, element_digest

Shapes: TypeAlias = Mapping[str, Sequence[int]]
"""Checkpoint name -> whole shape."""

Fusions: TypeAlias = Mapping[str, Sequence[str]]
"""Name of a fused module -> names of those it consists of, in the order of their rows."""


def held_fingerprint(model: Any, shapes: Shapes, dtype: torch.dtype, fusions: Fusions | None = None) -> Fingerprint:
    """Digests of the tensors that `model` holds in the order of their checkpoint.

    Matrices that were repacked for a CPU's kernels, rounded to 8 bits or cut over GPUs are not among them.

    Args:
        model: has `named_parameters()`.
        shapes: of the tensors to look for.
        dtype: of the digested values: the engine's.
        fusions: None = the model's own mapping (`packed_modules_mapping`).
    """
    digests: Fingerprint = {}
    for name, tensor in find_parameters(model, shapes, fusions).items():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            digests[name] = element_digest(tensor, shapes[name], dtype)
    return digests


def find_parameters(model: Any, shapes: Shapes, fusions: Fusions | None = None) -> dict[str, Tensor]:
    """The rows of the model's parameters that each checkpoint tensor became, without those that have no such rows."""
    # once for all names: a model with experts has tens of thousands
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    mapping: Fusions = (getattr(model, "packed_modules_mapping", None) or {}) if fusions is None else fusions
    found = {name: _find(parameters, name, shapes, mapping) for name in shapes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _find(parameters: Mapping[str, Tensor], name: str, shapes: Shapes, fusions: Fusions) -> Tensor | None:
    """The rows that checkpoint tensor `name` became, or None where there are no such rows."""
    shape = tuple(shapes[name])
    if name in parameters:
        return _rows(parameters[name], 0, shape)
    for fused, parts in fusions.items():
        for number, part in enumerate(parts):
            if f".{part}." not in name:
                continue
            siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
            target = parameters.get(name.replace(f".{part}.", f".{fused}."))
            # without the shapes of all parts the first row of this one cannot be known
            if target is None or target.dim() == 0 or not all(sibling in shapes for sibling in siblings):
                continue
            rows = [shapes[sibling][0] for sibling in siblings]
            # fewer rows than all parts have together: cut over GPUs, where a part's rows are at other offsets
            return _rows(target, sum(rows[:number]), shape) if target.shape[0] >= sum(rows) else None
    return None


def _rows(parameter: Tensor, first: int, shape: tuple[int, ...]) -> Tensor | None:
    """Rows `first` and on of a parameter that may have more (a padded vocabulary, a fused matrix)."""
    if parameter.dim() != len(shape) or parameter.dim() == 0 or parameter.shape[1:] != shape[1:]:
        return None
    if parameter.shape[0] < first + shape[0]:
        return None
    return parameter.detach()[first : first + shape[0]]
