"""Embeddings of items in `.emb-*.npy` files, which are mapped into memory and never unpickled."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from rft_core.errors import DataError
from rft_genrec.catalogue.file_errors import refused_file

_FORM = "a .npy file of numbers, items x dimension, row n for item n"
_MOST_HEADER_BYTES = 10_000
_ROWS_AT_ONCE = 4096
_UNREADABLE = (
    *(OSError, ValueError, TypeError, EOFError, LookupError, MemoryError, OverflowError, RecursionError, SyntaxError),
    TokenError,
)
"""What numpy raises for a header that is none, which it reads as an expression of Python without running it."""


def read_embeddings(path: Path, num_items: int) -> NDArray[np.floating]:
    """Return the embeddings of a catalogue, [items, dimension], mapped into memory.

    Raises:
        DataError: the file is no such array, has another number of items, or holds a value that is not finite.
    """
    array = _mapped(path)
    if array.dtype.kind != "f" or array.ndim != 2 or not array.shape[1]:
        raise refused_file(path, f"holds {array.dtype} of shape {array.shape}", _FORM)
    if len(array) != num_items:
        raise refused_file(path, f"has {len(array)} rows for {num_items} items", _FORM)
    for start in range(0, num_items, _ROWS_AT_ONCE):
        finite = np.isfinite(array[start : start + _ROWS_AT_ONCE]).all(axis=1)
        if not finite.all():
            row = start + int((~finite).argmax())
            raise refused_file(path, f"row {row} holds a value that is not finite", "every value is a number")
    return array


def _mapped(path: Path) -> NDArray[np.floating]:
    try:
        with path.open("rb") as file:
            is_array = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        if not is_array:
            raise refused_file(path, "is no .npy file", _FORM)
        return np.load(path, mmap_mode="r", allow_pickle=False, max_header_size=_MOST_HEADER_BYTES)
    except DataError:
        raise
    except _UNREADABLE as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise refused_file(path, f"cannot be read: {first}", _FORM) from error
