"""Codebooks that training starts from: a file of another program or of this one, checked before anything begins."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rft_genrec.semantic_ids.codebooks import checked_levels, refused_codebooks

_BYTES_OF_A_NUMBER = 16
_BYTES_OF_HEADERS = 1 << 28
"""And of other arrays beside the codebooks."""
_UNREADABLE = (
    *(OSError, ValueError, TypeError, EOFError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, TokenError),
)
"""What numpy and the archive's reader raise for files that are none."""


def start_codebooks(path: str, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Read `codebook_0`, `codebook_1`, ... from `.npz` or `.safetensors`; nothing is unpickled.

    Raises:
        DataError: no such file, other names, or another shape than the settings and the vectors ask for.
    """
    file = Path(path)
    if file.suffix == ".npz":
        tensors = _read_npz(file, _BYTES_OF_A_NUMBER * dim * sum(sizes) + _BYTES_OF_HEADERS)
    elif file.suffix == ".safetensors":
        tensors = _read_safetensors(file)
    else:
        why = "codebooks are in a .npz or a .safetensors file"
        raise refused_codebooks(file, f"the name ends with {file.suffix!r}", why)
    codebooks = checked_levels(file, tensors)
    found = [tuple(codebook_KD.shape) for codebook_KD in codebooks]
    wanted = [(size, dim) for size in sizes]
    if found != wanted:
        what = f"shapes {', '.join(map(str, found))}; wanted {', '.join(map(str, wanted))}"
        do = f"--levels {len(found)} --codes {','.join(str(size) for size, _ in found)}"
        if any(one[1] != dim for one in found):
            do = f"codebooks that were made of vectors of {dim} numbers, or --codebooks= for those of rqkmeans_balanced"
        raise refused_codebooks(
            file, what, "a codebook a level, with the codes of the level and the embeddings' numbers", do
        )
    return codebooks


def _read_npz(file: Path, most_bytes: int) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        # compressed zeros of any size take next to nothing on the disk
        if num_bytes > most_bytes:
            what = f"it unpacks to {num_bytes:,} bytes; codebooks of these sizes take at most {most_bytes:,}"
            raise refused_codebooks(file, what, "a .npz of the codebooks alone is needed")
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(np.asarray(arrays[name], dtype=np.float32)) for name in arrays.files}
    except _UNREADABLE as error:
        raise refused_codebooks(file, f"it cannot be read: {error}", "a .npz of arrays of numbers is needed") from error


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 not a dict
    except (OSError, SafetensorError) as error:
        raise refused_codebooks(file, f"it cannot be read: {error}", "a .safetensors file is needed") from error
