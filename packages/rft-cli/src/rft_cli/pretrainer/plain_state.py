"""The state of an optimizer, a scheduler or a random generator as JSON and tensors, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rft_core.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS, _NUMBER = "$tensor", "$tuple", "$items", "$number"


def split(state: object, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as a JSON value, and its tensors by the names that stand in their places.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, texts, booleans and None.
        name: what the state is of, for messages and in front of the tensors' names.

    Raises:
        CheckpointError: it holds something else, such as a function.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: object, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {_TENSOR: path}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_NUMBER: repr(value)}
        if isinstance(value, tuple | list):
            parts = [plain(part, f"{path}.{number}") for number, part in enumerate(cast("list[object]", value))]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, object]", value).items()
            return {_ITEMS: [[plain(key, f"{path}.key"), plain(part, f"{path}.{key}")] for key, part in pairs]}
        raise CheckpointError(
            code="checkpoint.not_plain",
            what=f"{path} is a {type(value).__name__}",
            where=name,
            why="checkpoints hold tensors, numbers and texts, so that no code runs when they are read",
            state="nothing was written",
            do="keep it out of the state, and make it again before load_checkpoint",
        )

    return plain(state, name), tensors


def joined(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `split` took apart."""
    if isinstance(plain, list):
        return [joined(part, tensors) for part in cast("list[Any]", plain)]
    if not isinstance(plain, dict):
        return plain
    [(kind, value)] = cast("dict[str, Any]", plain).items()
    if kind == _TENSOR:
        return tensors[value]
    if kind == _NUMBER:
        return float(value)
    if kind == _TUPLE:
        return tuple(joined(part, tensors) for part in value)
    return {joined(key, tensors): joined(part, tensors) for key, part in value}


def random_state() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch, of every GPU too."""
    import random

    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.tensor([int(key) for key in keys]), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Put the random generators into a state of `random_state`."""
    import random

    import numpy as np

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
