"""Codebooks that training starts from: path, keys and shapes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError
from rft_genrec.semantic_ids.start_codebooks import start_codebooks


def test_both_kinds_of_file_are_read(tmp_path: Path) -> None:
    arrays = {"codebook_0": np.ones((4, 3), np.float32), "codebook_1": np.zeros((2, 3), np.float32)}
    np.savez(tmp_path / "c.npz", **arrays)
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "c.safetensors")
    for name in ("c.npz", "c.safetensors"):
        first, second = start_codebooks(str(tmp_path / name), (4, 2), 3)
        assert (tuple(first.shape), float(first.sum()), tuple(second.shape)) == ((4, 3), 12, (2, 3))


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({}, "it holds nothing"),
        ({"centers": np.ones((4, 3))}, "it holds centers"),
        ({"codebook_0": np.ones((4, 3))}, r"shapes \(4, 3\); wanted \(4, 3\), \(2, 3\)"),
        ({"codebook_0": np.ones((4, 9)), "codebook_1": np.ones((2, 9))}, r"shapes \(4, 9\), \(2, 9\)"),
        ({"codebook_0": np.array([{"a": 1}], dtype=object)}, "cannot be read"),
    ],
)
def test_absent_partial_and_other_codebooks_are_refused(tmp_path: Path, arrays, what: str) -> None:
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(DataError, match=what):
        start_codebooks(str(tmp_path / "c.npz"), (4, 2), 3)


@pytest.mark.parametrize("name", ["none.npz", "none.safetensors", "c.pt"])
def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=name):
        start_codebooks(str(tmp_path / name), (4, 2), 3)
