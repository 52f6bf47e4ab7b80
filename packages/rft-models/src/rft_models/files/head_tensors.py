"""Tensors of scalar heads as they stand in a directory's safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rft_core.errors import DataError
from rft_models.files.directories import damaged_weights, read_json


def stored_tensor(path: Path, name: str) -> Tensor | None:
    """Read the tensor of this name in the directory's safetensors, or None; `DataError` for a damaged file."""
    file = file_with_tensor(path, name)
    if file is None:
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise damaged_weights(file, error) from error


def refuse_bias(path: Path, head_prefix: str) -> None:
    """Raise `DataError` where the head "<prefix>.weight" comes with a bias."""
    name = f"{head_prefix}.bias"
    file = file_with_tensor(path, name)
    if file is not None:
        raise DataError(
            code="models.value_head_bias",
            what=f"the value head has a bias, {name}",
            where=str(file),
            why="the head computed here has none, and leaving a bias out would shift every value",
            do="use a model whose value head has no bias, or another prefix to start from a new head",
        )


def file_with_tensor(path: Path, name: str) -> Path | None:
    """Return the file among those that transformers reads which holds a tensor of this name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, Any] = read_json(index).get("weight_map", {})
        return path / weight_map[name] if name in weight_map else None
    file = path / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            return file if name in opened.keys() else None  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise damaged_weights(file, error) from error
