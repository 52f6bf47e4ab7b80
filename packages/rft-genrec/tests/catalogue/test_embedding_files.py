"""Embeddings in .npy files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_core.errors import DataError
from rft_genrec.catalogue.embedding_files import read_embeddings


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


GOOD = np.arange(6, dtype=np.float16).reshape(3, 2)


def test_embeddings_are_read(tmp_path: Path) -> None:
    (tmp_path / "e.npy").write_bytes(saved(GOOD))
    assert np.array_equal(read_embeddings(tmp_path / "e.npy", 3), GOOD)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved(GOOD[:2]), "2 rows for 3 items"),
        (saved(GOOD[:, 0]), r"float16 of shape \(3,\)"),
        (saved(GOOD.astype(np.int64)), "int64"),
        (saved(np.array([[1.0, 2], [3, np.nan], [4, np.inf]])), "row 1 holds a value that is not finite"),
        (saved(np.array([{}, {}, {}], dtype=object)), "cannot be read"),
        (saved(GOOD)[:-3], "cannot be read"),
        (saved(GOOD)[:20], "cannot be read"),
        (b"PK\x03\x04zip", "is no .npy file"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "cannot be read"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "e.npy").write_bytes(data)
    with pytest.raises(DataError, match=said):
        read_embeddings(tmp_path / "e.npy", 3)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_embeddings(tmp_path / "e.npy", 3)
