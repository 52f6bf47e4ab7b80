"""Baselines by name, made from sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rft_genrec.baselines.counters import ItemNeighbours, Popularity, Transitions
from rft_genrec.baselines.recommender import ItemScorer
from rft_genrec.baselines.sasrec import SasRec, train_sasrec
from rft_genrec.baselines.sasrec_model import SasRecSizes

Sequences = Sequence[Sequence[int]]

COUNTERS: Mapping[str, Callable[[Sequences, int], ItemScorer]] = {
    "popularity": Popularity,
    "first_order": partial(Transitions, num_steps=1, decay=0.0),
    "transitions": Transitions,
    "item_knn": ItemNeighbours,
}
"""Recommenders that are made in seconds, by name."""
SASREC = "sasrec"


def fitted(name: str, sequences: Sequences, num_items: int, *, seed: int, sasrec: str = "") -> ItemScorer:
    """Return the baseline of a name of `rft_genrec.settings.eval.BASELINES`, made from sequences.

    `sasrec` is the directory of a SASRec: it is read where it is there, else trained and written; empty = trained.
    """
    if name != SASREC:
        return COUNTERS[name](sequences, num_items)
    directory = Path(sasrec).expanduser()
    if sasrec and directory.exists():
        return SasRec.load(directory, num_items=num_items)
    trained = train_sasrec(sequences, SasRecSizes(num_items=num_items), seed=seed)
    if sasrec:
        trained.save(directory)
    return trained
