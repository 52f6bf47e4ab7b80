"""Tensors in a file, in the layout of safetensors: data only, read by mapping, written by mapping.

8 bytes with the length of a JSON header, the header (name -> dtype, shape, begin and end in the data),
the data. Written straight from the tensors, so that nothing is held twice; in /dev/shm the file is
shared memory.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import StorageError
from rft_engine.weight_sync.private_folder import private_folder, remove_leftovers

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_HEADER_BYTES_A_TENSOR = 512
_LEAST_HEADER_ROOM = 2**16
_MEMORY = Path("/dev/shm")


def shared_directory(num_bytes: int) -> Path:
    """Return this process's own folder: in shared memory where that much is free, else in the temporary directory."""
    return private_folder(_roomy(num_bytes))


def own_path(name: str, num_bytes: int) -> Path:
    """Return the path of a weight file of this process in its own folder."""
    return shared_directory(num_bytes) / f"{name}.safetensors"


def remove_all_leftovers() -> None:
    """Remove what killed processes of this user left, wherever it went."""
    for folder in {_MEMORY, Path(tempfile.gettempdir())}:
        remove_leftovers(folder)


def _roomy(num_bytes: int) -> Path:
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > num_bytes + 2**26:
        return _MEMORY
    return Path(tempfile.gettempdir())


def _for_the_owner(path: str, flags: int) -> int:
    """Open a file that its user alone may read; one that somebody put there as a link is refused."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_weight_file(path: Path, tensors: Iterable[tuple[str, Tensor]], expected_tensors: int = 1000) -> int:
    """Write tensors as they come; returns the bytes of data.

    The data goes in first, behind room for a header of about `expected_tensors` entries.

    Raises:
        StorageError: there is no room for them.
    """
    room = max(_LEAST_HEADER_ROOM, _HEADER_BYTES_A_TENSOR * expected_tensors)
    entries: dict[str, Any] = {}
    end = 0
    with open(path, "w+b", opener=_for_the_owner) as file:
        for name, tensor in tensors:
            contiguous = tensor.detach().contiguous()
            size = contiguous.numel() * contiguous.element_size()
            entries[name] = {
                "dtype": _CODES[contiguous.dtype],
                "shape": list(contiguous.shape),
                "data_offsets": [end, end + size],
            }
            try:
                # each as it comes, so that one whole tensor at a time is in memory
                _write_at(file.fileno(), room + end, contiguous, size)
            except OSError as error:
                raise _no_room(path, end + size, error) from error
            end += size
        # last: names and shapes are known only when every tensor has come
        header = json.dumps(entries, separators=(",", ":")).encode()
        assert len(header) <= room - 8, f"a header of {len(header)} bytes for {len(entries)} tensors"
        # JSON allows the spaces that fill the room
        file.write(struct.pack("<Q", room - 8) + header.ljust(room - 8))
    return end


def _write_at(descriptor: int, start: int, tensor: Tensor, size: int) -> None:
    """Copy a tensor's bytes into the file, from whatever device it is on.

    The room is taken first: a write into a mapping of full shared memory would end this process.
    """
    if not size:
        return
    # a write into a mapping of full shared memory would end this process by a signal
    os.posix_fallocate(descriptor, start, size)
    # a mapping can begin at a page only
    page = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, start + size - page, offset=page) as memory:
        target = torch.frombuffer(memory, dtype=torch.uint8, offset=start - page)
        target.copy_(tensor.reshape(-1).view(torch.uint8))
        del target  # the mapping cannot be closed while a tensor looks at it


def read_header(path: str | Path) -> dict[str, Any]:
    """Name -> {"dtype", "shape", "data_offsets"}; nothing else of the file is read."""
    with Path(path).open("rb") as file:
        [size] = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def read_weight_file(path: str | Path) -> dict[str, Tensor]:
    """The file's tensors, mapped and not copied; they stay readable when the file is deleted."""
    header = read_header(path)
    with Path(path).open("rb") as file:
        [size] = struct.unpack("<Q", file.read(8))
        # private pages: torch wants memory that can be written, and nothing written reaches the file
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _read_at(memory, 8 + size, entry, name) for name, entry in header.items()}


def _read_at(memory: mmap.mmap, start: int, entry: dict[str, Any], name: str) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    assert end - begin == prod(shape) * dtype.itemsize, f"{name}: {end - begin} bytes for {shape} of {dtype}"
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=start + begin)
    # a view as a wider dtype needs an aligned start
    aligned = raw if (start + begin) % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).reshape(shape)


def _no_room(path: Path, num_bytes: int, error: OSError) -> StorageError:
    return StorageError(
        code="engine.weights.no_room",
        what=f"{path}: {error.strerror} after {num_bytes / 2**20:.0f} MiB of weights",
        where=f"transfer of weights to the engine, in {path.parent}",
        why="the engine's process reads them from there",
        state="the engine does not hold all weights; it refuses to generate until a load succeeds",
        do="TMPDIR=/a/directory/with/room rft-train ..., or more shared memory (docker: --shm-size)",
    )
