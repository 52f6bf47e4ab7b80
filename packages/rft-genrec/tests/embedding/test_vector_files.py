"""Files of vectors, read strictly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError
from rft_genrec.embedding.vector_files import read_embeddings, refuse_other_texts, stored_facts, write_embeddings


def test_vectors_and_their_facts_come_back(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    write_embeddings(tmp_path / "a.emb-x.npy", values.double(), {"encoder": "x", "texts_sha256": "1"})
    assert torch.equal(read_embeddings(tmp_path / "a.emb-x.npy", 3), values)
    assert np.load(tmp_path / "a.emb-x.npy").dtype == np.float32
    facts = stored_facts(tmp_path / "a.emb-x.npy")
    assert facts == json.loads((tmp_path / "a.emb-x.json").read_text())
    refuse_other_texts(tmp_path / "a.emb-x.npy", "1", facts)
    with pytest.raises(DataError, match="other items or texts"):
        refuse_other_texts(tmp_path / "a.emb-x.npy", "2", facts)
    save_file({"vectors": values}, tmp_path / "b.safetensors")
    assert torch.equal(read_embeddings(tmp_path / "b.safetensors", 3), values)
    assert stored_facts(tmp_path / "b.safetensors") == {}


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((2, 4)), "2 rows for 3 items"),
        (np.zeros(3), r"the shape is \(3,\)"),
        (np.array([[0.0], [np.nan], [np.inf]]), "2 rows hold NaN or infinity, the first is row 1"),
        (np.array([["a"], ["b"], ["c"]]), "numbers are needed"),
        (np.array([[{}], [{}], [{}]], dtype=object), "cannot be read"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray, what: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=what):
        read_embeddings(tmp_path / "a.npy", 3)


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 1), "b": torch.zeros(3, 1)}, tmp_path / "two.safetensors")
    for name, what in (("two.safetensors", "2 tensors"), ("none.npy", "cannot be read"), ("a.pt", "the name ends")):
        with pytest.raises(DataError, match=what):
            read_embeddings(tmp_path / name, 3)
