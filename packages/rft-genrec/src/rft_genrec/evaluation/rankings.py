"""Ranked items of one sample, of a model or of a baseline, as measures and files read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_genrec.baselines.recommender import RankedItems


@dataclass(frozen=True, slots=True)
class Ranking:
    """Places for one sample, best first; a place holds the items that share what was ranked.

    A baseline ranks items, one a place. A model ranks semantic IDs: a place has every item of an ID, the most popular
    first.

    Example: `Ranking("test:0", places=((4,), (9, 2)), scores=(-0.5, -2.0))`.
    """

    sample_id: str
    places: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    """Of each place; higher is better."""

    def items(self, k: int) -> list[int]:
        """Return the first k items, those of one place in its order."""
        return [item for place in self.places[:k] for item in place][:k]

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"sample_id": self.sample_id, "places": [list(place) for place in self.places], "scores": self.scores}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Ranking:
        """Return what `as_record` gave.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        places = tuple(tuple(int(item) for item in place) for place in record["places"])
        scores = tuple(float(score) for score in record["scores"])
        if len(places) != len(scores) or not isinstance(record["sample_id"], str):
            raise ValueError("places and scores of a ranking differ in number")
        return cls(record["sample_id"], places, scores)


def rankings_of(ranked: Sequence[RankedItems], sample_ids: Sequence[str]) -> list[Ranking]:
    """Return the rankings of a baseline: one item a place."""
    return [
        Ranking(sample_id, tuple((item,) for item in one.items), one.scores)
        for one, sample_id in zip(ranked, sample_ids, strict=True)
    ]
