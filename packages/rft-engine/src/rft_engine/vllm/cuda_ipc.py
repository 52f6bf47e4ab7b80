"""CUDA IPC handles as JSON: the values by which `torch.multiprocessing` opens a tensor in another process.

vLLM pickles them for its own transports. They are a tuple of numbers, sizes, byte strings, a dtype
and two classes that are always the same, so they can be written as data, and nothing that arrives is run.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (JSON values have no types until they are looked at)

from __future__ import annotations

import base64
from typing import Any

import torch

_CLASSES: dict[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.TypedStorage,
}
_NAMES = {kind: name for name, kind in _CLASSES.items()}


def encode_update(update_info: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `update_info` with its `ipc_handles` as JSON values; others are JSON already."""
    handles = update_info.get("ipc_handles")
    return update_info if handles is None else {**update_info, "ipc_handles": encode(handles)}


def decode_update(update_info: dict[str, Any]) -> dict[str, Any]:
    """Decode an update that `encode_update` encoded."""
    handles = update_info.get("ipc_handles")
    return update_info if handles is None else {**update_info, "ipc_handles": decode(handles)}


def encode(value: Any) -> Any:
    """A JSON value that `decode` turns back: tuples, bytes, dtypes and the known classes are tagged."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        # as pairs: keys need not be text, and no key can be taken for a tag
        return {"map": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):  # torch.Size among them
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    assert value in _NAMES, f"a CUDA handle holds {value!r}, which is not among the values that handles consist of"
    return {"class": _NAMES[value]}


def decode(value: Any) -> Any:
    """Decode a value that `encode` encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "map":
        return {decode(key): decode(item) for key, item in content}
    if tag == "tuple":
        return tuple(decode(item) for item in content)
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "dtype":
        dtype = getattr(torch, content)
        assert isinstance(dtype, torch.dtype), f"{content} is not a dtype"
        return dtype
    return _CLASSES[content]
