"""Latent semantic analysis: TF-IDF weights of words, projected on their leading singular vectors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rft_core.durable_files import replace_bytes
from rft_core.errors import DataError
from rft_core.keyed_random import derive_key, keyed_normal

_WORD = re.compile(r"[^\W_]+(?:[./'-][^\W_]+)*")
_MOST_WORDS = 20_000
_LEAST_ITEMS = 2
_POWER_STEPS = 4
_MORE_COLUMNS = 16
"""Columns of the random projection beyond the singular vectors that are wanted (Halko et al., section 4.2)."""


@dataclass(frozen=True)
class TfidfEncoder:
    """Words, their weights, and the directions that texts are projected on.

    Of a text with the counts t_w the weight of word w is (1 + ln t_w) * (1 + ln((1 + N) / (1 + n_w))), n_w of the N
    fitted texts having it; the vector is scaled to length 1 and multiplied by the leading right singular vectors of
    all fitted texts. Deerwester et al. 1990, "Indexing by latent semantic analysis"; the weights are scikit-learn's
    with a sublinear count.
    """

    words: tuple[str, ...]
    weights_V: Tensor
    directions_VD: Tensor

    @property
    def dim(self) -> int:
        """Return the numbers of a vector."""
        return self.directions_VD.shape[1]

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return [N, D] float32; a text without a known word has zeros."""
        return torch.sparse.mm(_weighted(texts, self.words, self.weights_V), self.directions_VD)

    def save(self, file: Path) -> None:
        """Write the encoder, to encode items that come later."""
        tensors = {"weights": self.weights_V, "directions": self.directions_VD.contiguous()}
        replace_bytes(file, save(tensors, {"words": json.dumps(self.words)}))


def load_tfidf(file: str | Path) -> TfidfEncoder:
    """Read what `TfidfEncoder.save` wrote.

    Raises:
        DataError: the file is absent, damaged or something else.
    """
    try:
        with safe_open(str(file), framework="pt") as tensors:
            words = tuple(json.loads((tensors.metadata() or {})["words"]))
            found = TfidfEncoder(words, tensors.get_tensor("weights"), tensors.get_tensor("directions"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _no_encoder(file, f"it cannot be read: {error}") from error
    if len(words) != len(found.weights_V) or len(words) != len(found.directions_VD):
        raise _no_encoder(file, f"{len(words)} words, {len(found.weights_V)} weights")
    return found


def fit_tfidf(texts: Sequence[str], dim: int, *, seed: int) -> TfidfEncoder:
    """Fit words and directions: those of at least two texts, and of more than 20,000 words the most frequent.

    The singular vectors are found by a randomised range finder with power steps (Halko, Martinsson and Tropp 2011,
    "Finding structure with randomness", algorithm 4.4); signs are such that the largest entry of each is positive.

    `dim` is the most directions; there are fewer where there are fewer words or texts.

    Raises:
        DataError: no word is in two of the texts.
    """
    in_texts = Counter(word for text in texts for word in set(_words(text)))
    known = sorted((word for word, count in in_texts.items() if count >= _LEAST_ITEMS), key=lambda w: (-in_texts[w], w))
    words = tuple(sorted(known[:_MOST_WORDS]))
    if not words:
        raise DataError(
            code="genrec.too_few_words",
            what=f"{len(texts)} texts, and no word that two of them have",
            where="--encoder tfidf",
            why="a word of one item alone says nothing of others",
            do="--encoder minilm, or another encoder of texts",
        )
    dim = min(dim, len(words), len(texts))
    counts_V = torch.tensor([in_texts[word] for word in words], dtype=torch.float32)
    weights_V = 1 + torch.log((1 + len(texts)) / (1 + counts_V))
    matrix_NV = _weighted(texts, words, weights_V)
    return TfidfEncoder(words, weights_V, _right_singular_vectors(matrix_NV, dim, seed))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _weighted(texts: Sequence[str], words: Sequence[str], weights_V: Tensor) -> Tensor:
    """[N, V] sparse: rows of length 1."""
    number = {word: place for place, word in enumerate(words)}
    rows, columns, counts = list[int](), list[int](), list[int]()
    for row, text in enumerate(texts):
        found = Counter(number[word] for word in _words(text) if word in number)
        for column in sorted(found):
            rows.append(row)
            columns.append(column)
            counts.append(found[column])
    places, column_P = torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)
    values_P = (1 + torch.tensor(counts, dtype=torch.float32).log()) * weights_V[column_P]
    norms_N = torch.zeros(len(texts)).index_add_(0, places, values_P.square()).sqrt()
    values_P = values_P / norms_N[places]
    shape = (len(texts), len(words))
    return torch.sparse_coo_tensor(
        torch.stack([places, column_P]), values_P, shape, is_coalesced=True, check_invariants=False
    )


def _right_singular_vectors(matrix_NV: Tensor, dim: int, seed: int) -> Tensor:
    width = min(dim + _MORE_COLUMNS, *matrix_NV.shape)
    start_VW = keyed_normal((matrix_NV.shape[1], width), derive_key(seed, "tfidf"))
    transposed_VN = matrix_NV.T.coalesce()
    basis_NW, _ = torch.linalg.qr(torch.sparse.mm(matrix_NV, start_VW))
    for _ in range(_POWER_STEPS):
        basis_VW, _ = torch.linalg.qr(torch.sparse.mm(transposed_VN, basis_NW))
        basis_NW, _ = torch.linalg.qr(torch.sparse.mm(matrix_NV, basis_VW))
    small_VW = torch.sparse.mm(transposed_VN, basis_NW)
    directions_VD = torch.linalg.svd(small_VW, full_matrices=False).U[:, :dim]
    largest_D = directions_VD.gather(0, directions_VD.abs().argmax(0, keepdim=True))
    return directions_VD * largest_D.sign()


def _no_encoder(file: str | Path, what: str) -> DataError:
    return DataError(
        code="genrec.encoder_file",
        what=f"{Path(file).name}: {what}",
        where=str(file),
        why="an .encoder.safetensors file that `rft-train genrec embed --encoder tfidf` wrote is needed",
        do="--encoder tfidf on the catalogue, which writes it",
    )
