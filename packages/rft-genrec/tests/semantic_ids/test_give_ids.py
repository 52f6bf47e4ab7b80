"""The file of vectors that a command means."""

from pathlib import Path

import pytest

from rft_core.errors import OptionsError
from rft_genrec.semantic_ids.give_ids import with_vectors
from rft_genrec.settings.sid import SidSettings, VectorSettings


def meant(folder: Path, *, new_items: str = "") -> str:
    settings = SidSettings(vectors=VectorSettings(catalogue=str(folder), new_items=new_items))
    return with_vectors(settings).vectors.embeddings


def test_the_only_vectors_of_a_catalogue_are_meant(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="no file") as caught:
        meant(tmp_path)
    assert caught.value.problem.do == f"rft-train genrec embed --catalogue {tmp_path}"
    (tmp_path / "a.emb-tfidf.npy").touch()
    assert meant(tmp_path) == str(tmp_path / "a.emb-tfidf.npy")
    with pytest.raises(OptionsError) as caught:
        meant(tmp_path, new_items="new.item.json")
    assert "new items" in caught.value.problem.do
    (tmp_path / "a.emb-minilm.npy").touch()
    with pytest.raises(OptionsError, match=r"minilm.*tfidf") as caught:
        meant(tmp_path)
    assert caught.value.problem.do == f"--embeddings {tmp_path / 'a.emb-minilm.npy'}"
