"""Tensors as a safetensors file, piece by piece: one tensor at a time is copied to the CPU.

The format (https://github.com/huggingface/safetensors, "Format"): the length of the header as
eight little-endian bytes, the header as JSON (name -> dtype, shape, offsets; `__metadata__` -> text
by text), then the tensors' bytes. The library's own writer wants the whole file in memory to hash
it and refuses tensors that share memory; reading is the library's, which checks the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def num_tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def file_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The file in pieces, the same bytes for the same tensors: widest dtype first, then by name."""
    yield _header(tensors, metadata)
    for name in _order(tensors):
        yield tensor_bytes(tensors[name])


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in _order(tensors):
        tensor = tensors[name]
        end = start + num_tensor_bytes(tensor)
        assert tensor.dtype in DTYPE_NAMES, f"{name} has dtype {tensor.dtype}, which safetensors cannot hold"
        fields[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the data start at a multiple of eight
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes in row-major order; a copy only where the tensor is elsewhere or not contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    # bytes by torch, since numpy has neither bfloat16 nor float8
    return flat.view(torch.uint8).numpy().data
