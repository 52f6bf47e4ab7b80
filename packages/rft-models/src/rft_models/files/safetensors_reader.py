"""The tensors of a Hugging Face directory, read a block at a time: no whole tensor has to be in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rft_core.errors import OptionsError
from rft_models.files.directories import damaged_weights
from rft_models.files.finite_weights import is_finite, not_finite


class WeightFiles:
    """Reader of a model's tensors in its safetensors files, part by part on demand.

    Example::

        files = WeightFiles(Path("model"))
        files.refuse_others({"lm_head.weight": (151936, 896)})
        rows = files.block("lm_head.weight", start=(0, 0), shape=(75968, 896))      # the first half of it
    """

    def __init__(self, directory: Path) -> None:
        """Open every safetensors file of a directory; raises DataError where one is damaged."""
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stored_as: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise damaged_weights(path, error) from error
            self._files[path.name] = file
            for name in file.keys():  # noqa: SIM118 - the object is no mapping
                self._places[name] = path.name
                self._shapes[name] = tuple(file.get_slice(name).get_shape())  # from the header, no tensor is read

    def names(self) -> list[str]:
        """Return the names of all tensors, as the files have them."""
        return list(self._places)

    def rename(self, stored_as: Mapping[str, str]) -> None:
        """Set the mapping from a model's own names to names in the files; `block` then takes own names."""
        self._stored_as = dict(stored_as)

    def refuse_others(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse unless every tensor of the model is one tensor of the files, in its own shape.

        Raises:
            OptionsError: transformers would rename, split or join tensors on the way into the model.
        """
        there = {name: self._shapes.get(self._stored_as.get(name, name)) for name in shapes}
        differing = [
            f"{name} {list(shape)} ({'not in the files' if (other := there[name]) is None else list(other)})"
            for name, shape in sorted(shapes.items())
            if there[name] != shape
        ]
        if differing:
            raise OptionsError(
                code="models.meta_names",
                what=f"{len(differing)} of {len(shapes)} tensors of the model are not stored in the files as the "
                f"model has them; the first is {differing[0]}",
                where=f"--meta_init with {self._directory}",
                why="a rank reads its blocks straight from the files, so they must hold a tensor in its own shape",
                do="leave --meta_init out: the weights are then loaded whole and distributed",
            )

    def block(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read `shape` elements from `start` on, in the type of the file.

        Raises:
            DataError: the file is damaged, or an element is NaN or infinite.
        """
        stored = self._stored_as.get(name, name)
        path = self._directory / self._places[stored]
        try:
            block: Tensor = self._files[path.name].get_slice(stored)[_slices(start, shape)]
        except (SafetensorError, OSError) as error:
            raise damaged_weights(path, error) from error
        if not is_finite(block):
            raise not_finite(stored, block, path)
        return block

    def close(self) -> None:
        """Close the files and free their mappings."""
        self._files = {}


def _slices(start: Sequence[int], shape: Sequence[int]) -> Any:
    slices = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    return slices if slices else ...  # a scalar has no dimension to slice


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters by name, tied ones once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
