"""The value head of a model directory: found and checked in the files, or drawn from a seed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.files.directories import read_json

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def checked_prefix(head_prefix: str) -> str:
    """The prefix, if tensors can be named with it; otherwise `OptionsError`."""
    if _NAME.fullmatch(head_prefix):
        return head_prefix
    raise OptionsError(
        code="models.value_head_prefix",
        what=f"value head prefix {head_prefix!r}",
        where="value head prefix",
        why='the head is the tensor "<prefix>.weight": letters, digits and underscores, perhaps with dots between',
        do='use "score"',
    )


def value_head(weight_1D: Tensor) -> nn.Linear:
    """A linear layer without bias around this weight."""
    head = nn.Linear(weight_1D.shape[1], 1, bias=False, device="meta")
    head.weight = nn.Parameter(weight_1D)
    return head


def initial_head(hidden_size: int, *, seed: int) -> Tensor:
    """[1, D] float32, every entry from N(0, 1 / (D + 1)), a function of the seed.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback" (arXiv 2009.01325), appendix B.1;
    1 / (D + 1) is the variance. With it the first values have about the scale of the normalised states.
    """
    return keyed_normal((1, hidden_size), derive_key(seed, "value-head")) / math.sqrt(hidden_size + 1)


def stored_head(path: Path, head_prefix: str, hidden_size: int) -> Tensor | None:
    """[1, D] of "<prefix>.weight" as it stands in the directory's safetensors, or None where it is not there.

    Raises:
        DataError: a tensor of this name has another shape, or comes with a bias.
    """
    name = f"{head_prefix}.weight"
    found = stored_tensor(path, name)
    if found is None:
        return None
    if list(found.shape) == [1, hidden_size]:
        refuse_bias(path, head_prefix)
        return found
    raise DataError(
        code="models.value_head_shape",
        what=f"{name} has shape {list(found.shape)}, a value head on this model has [1, {hidden_size}]",
        where=str(_file_of(path, name)),
        why=f"one linear layer maps a hidden state of {hidden_size} numbers to one value",
        do="name the prefix of the value head, or one that is not in the file to start from a new head",
    )


def stored_tensor(path: Path, name: str) -> Tensor | None:
    """The tensor of this name as it stands in the directory's safetensors, or None; `DataError` for a damaged file."""
    file = _file_of(path, name)
    if file is None:
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def refuse_bias(path: Path, head_prefix: str) -> None:
    """`DataError` where the head "<prefix>.weight" comes with a bias."""
    name = f"{head_prefix}.bias"
    file = _file_of(path, name)
    if file is not None:
        raise DataError(
            code="models.value_head_bias",
            what=f"the value head has a bias, {name}",
            where=str(file),
            why="the head computed here has none, and leaving a bias out would shift every value",
            do="use a model whose value head has no bias, or another prefix to start from a new head",
        )


def _file_of(path: Path, name: str) -> Path | None:
    """The file among those that transformers reads which holds a tensor of this name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, Any] = read_json(index).get("weight_map", {})
        return path / weight_map[name] if name in weight_map else None
    file = path / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            return file if name in opened.keys() else None  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> DataError:
    return DataError(
        code="models.damaged_weights",
        what=f"{file.name} does not open: {error}",
        where=str(file),
        why="the file is damaged or absent",
        do=f"copy {file.name} of the model again",
    )
