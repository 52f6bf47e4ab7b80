"""What every recommender can do: rank items for histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rft_core.errors import OptionsError

Scores = NDArray[np.float64]
_BATCH = 256


@dataclass(frozen=True, slots=True)
class RankedItems:
    """Items for one history, best first, each once.

    Example: `RankedItems(items=(4, 9), scores=(0.7, 0.1))`.
    """

    items: tuple[int, ...]
    scores: tuple[float, ...]
    """Higher is better; comparable within one list alone."""


class Recommender(Protocol):
    """Ranks the items of a catalogue."""

    def rank(self, histories: Sequence[Sequence[int]], k: int) -> list[RankedItems]:
        """Return the best k items of every history, whose items are in the order of time and may be none."""
        ...


class ItemScorer(Recommender, Protocol):
    """Gives every item of the catalogue a positive score for a history."""

    num_items: int

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return [H, N]: a number above 0 for each history and item, higher is better."""
        ...


class ScoredRanking:
    """`rank` and `score` of a recommender that has `scores`."""

    num_items: int

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return [H, N] scores above 0; the recommender defines them."""
        raise NotImplementedError

    def rank(self, histories: Sequence[Sequence[int]], k: int) -> list[RankedItems]:
        """Return the best k items of every history; of equal scores the lower item number first."""
        check_histories(histories, self.num_items)
        return [ranked for scores in self._batches(histories) for ranked in best(scores, k)]

    def score(self, history: Sequence[int], item: int) -> float:
        """Return the score of one item after a history."""
        check_histories([[*history, item]], self.num_items)
        return float(self.scores([history])[0, item])

    def _batches(self, histories: Sequence[Sequence[int]]) -> Iterator[Scores]:
        for start in range(0, len(histories), _BATCH):
            yield self.scores(histories[start : start + _BATCH])


def best(scores_HN: Scores, k: int) -> list[RankedItems]:
    """Return the k highest of every row; of equal ones the lower number first."""
    k = min(k, scores_HN.shape[1])
    order_HK = np.argsort(-scores_HN, axis=1, kind="stable")[:, :k]
    chosen_HK = np.take_along_axis(scores_HN, order_HK, axis=1)
    return [
        RankedItems(tuple(items), tuple(scores))
        for items, scores in zip(order_HK.tolist(), chosen_HK.tolist(), strict=True)
    ]


def check_histories(histories: Sequence[Sequence[int]], num_items: int) -> None:
    """Raise `OptionsError` for an item that the catalogue lacks."""
    for number, history in enumerate(histories):
        outside = next((item for item in history if not 0 <= item < num_items), None)
        if outside is not None:
            raise OptionsError(
                code="genrec.unknown_item",
                what=f"history {number} holds item {outside}",
                where="histories",
                why=f"the catalogue has the items 0 to {num_items - 1}",
                do="histories of the catalogue that the recommender was made for",
            )
