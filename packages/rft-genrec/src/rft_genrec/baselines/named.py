"""Baselines by name, made from sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names
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
NAMES = (*COUNTERS, SASREC)


def checked_names(text: str, flag: str) -> tuple[str, ...]:
    """Return the names of a list joined by commas.

    Raises:
        OptionsError: a name that no baseline has.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = next((name for name in names if name not in NAMES), None)
    if unknown is not None:
        near = nearest_names(unknown, NAMES)
        raise OptionsError(
            code="genrec.baseline",
            what=f"{flag.lstrip('-')} names {unknown!r}",
            where=flag,
            why=f"baselines are {', '.join(NAMES)}",
            do=f"{flag} {near[0] if near else NAMES[0]}",
        )
    return names


def fitted(name: str, sequences: Sequences, num_items: int, *, seed: int, sasrec: str = "") -> ItemScorer:
    """Return the baseline of a name, made from sequences; `sasrec` is a directory that holds a trained SASRec."""
    if name != SASREC:
        return COUNTERS[name](sequences, num_items)
    if sasrec:
        return SasRec.load(Path(sasrec), num_items=num_items)
    return train_sasrec(sequences, SasRecSizes(num_items=num_items), seed=seed)
