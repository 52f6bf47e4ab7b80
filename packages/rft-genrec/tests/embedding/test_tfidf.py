"""Latent semantic analysis of texts."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from rft_core.errors import DataError
from rft_genrec.embedding.tfidf import fit_tfidf, load_tfidf

TEXTS = [
    *(f"steel hammer {n} of weight" for n in ("one", "two", "three")),
    *(f"cotton shirt {n} of colour" for n in ("one", "two", "three")),
    "steel hammer one of colour",
    "cotton shirt two of weight",
]


def weights_by_hand(texts: list[str], words: tuple[str, ...]) -> torch.Tensor:
    rows = []
    for text in texts:
        row = []
        for word in words:
            count = text.split().count(word)
            idf = 1 + math.log((1 + len(texts)) / (1 + sum(word in other.split() for other in texts)))
            row.append((1 + math.log(count)) * idf if count else 0.0)
        length = math.sqrt(sum(value * value for value in row))
        rows.append([value / length for value in row])
    return torch.tensor(rows)


def test_vectors_are_projections_on_the_singular_vectors() -> None:
    fitted = fit_tfidf(TEXTS, 3, seed=1)
    matrix = weights_by_hand(TEXTS, fitted.words)
    found = fitted.encode(TEXTS)
    expected = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(found.norm(dim=0), expected.S[:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found @ found.T, (matrix @ expected.Vh[:3].T) @ (matrix @ expected.Vh[:3].T).T)
    near = F.normalize(found) @ F.normalize(found).T
    assert near[0, 1] > 0.7 > 0.3 > near[0, 4]
    # the signs are chosen, so the seed decides nothing but roundings
    torch.testing.assert_close(fit_tfidf(TEXTS, 3, seed=2).encode(TEXTS), found, rtol=1e-3, atol=1e-4)


def test_a_fitted_encoder_comes_back_from_its_file_and_knows_no_new_words(tmp_path: Path) -> None:
    fitted = fit_tfidf(TEXTS, 3, seed=1)
    fitted.save(tmp_path / "x.encoder.safetensors")
    read = load_tfidf(tmp_path / "x.encoder.safetensors")
    later = ["steel shirt", "nothing known"]
    assert torch.equal(read.encode(later), fitted.encode(later))
    assert not fitted.encode(later)[1].any()
    with pytest.raises(DataError, match="cannot be read"):
        load_tfidf(tmp_path / "absent.encoder.safetensors")


def test_there_are_no_more_numbers_than_words_or_texts() -> None:
    most = min(len(fit_tfidf(TEXTS, 1, seed=1).words), len(TEXTS))
    assert fit_tfidf(TEXTS, 100, seed=1).directions_VD.shape[1] == most


def test_texts_without_a_word_in_common_are_refused() -> None:
    with pytest.raises(DataError, match="no word that two of them have"):
        fit_tfidf(["one", "two"], 4, seed=1)
