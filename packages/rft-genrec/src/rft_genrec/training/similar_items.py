"""Rows that teach a model which items have similar texts: walks from an item to one of its neighbours, and on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rft_core.keyed_random import derive_key, uniforms
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.tasks import TaskRow

NUM_NEIGHBOURS = 20
"""Neighbours of an item that a walk may go to."""
TEMPERATURE = 0.1
"""Of the draw among them: p(b | a) is proportional to exp(cosine(a, b) / temperature)."""
_ROWS_AT_ONCE = 1024


def similar_rows(
    builder: PromptBuilder, embeddings_ND: NDArray[np.floating], *, num_steps: int, seed: int
) -> Iterator[TaskRow]:
    """Yield a walk of `num_steps` steps from every item; the model learns every item of it but the first.

    Args:
        builder: of prompts.
        embeddings_ND: a vector of the text of each item.
        num_steps: items behind the first.
        seed: of the draws, each of which is keyed by the item at which its walk begins and by its step.
    """
    neighbours_NK, cumulative_NK = neighbours(np.asarray(embeddings_ND, dtype=np.float32))
    keys_N = [derive_key(seed, "similar_items", item) for item in range(len(embeddings_ND))]
    draws_NS = uniforms(keys_N, num_steps).numpy()
    for first in range(len(embeddings_ND)):
        walk = [first]
        for draw in draws_NS[first]:
            place = int((cumulative_NK[walk[-1]] < draw).sum())
            walk.append(int(neighbours_NK[walk[-1], min(place, neighbours_NK.shape[1] - 1)]))
        text = "".join(builder.response(item) for item in walk[1:])
        yield TaskRow(f"similar:{first}", builder.history_text(walk[:1]), text)


def neighbours(vectors_ND: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the nearest items of each item by cosine, itself left out, and their cumulative probabilities."""
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(lengths_N1, 1e-12)
    k = min(NUM_NEIGHBOURS, len(unit_ND) - 1)
    places: list[NDArray[np.int64]] = []
    shares: list[NDArray[np.float32]] = []
    for start in range(0, len(unit_ND), _ROWS_AT_ONCE):
        cosines_BN = unit_ND[start : start + _ROWS_AT_ONCE] @ unit_ND.T
        rows = np.arange(len(cosines_BN))
        cosines_BN[rows, start + rows] = -np.inf
        nearest_BK = np.argsort(-cosines_BN, axis=1, kind="stable")[:, :k]
        weights_BK = np.exp((np.take_along_axis(cosines_BN, nearest_BK, axis=1) - 1) / TEMPERATURE)
        places.append(nearest_BK)
        shares.append(np.cumsum(weights_BK / weights_BK.sum(axis=1, keepdims=True), axis=1))
    return np.concatenate(places), np.concatenate(shares)
