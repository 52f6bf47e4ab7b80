"""Recommendations of a trained model from Python: items, titles and scores for histories."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rft.parallel.parallelize import weights_dtype
from rft.process.machine import choose_device
from rft_core.errors import OptionsError
from rft_genrec.baselines.counters import Popularity
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.catalogue.records import Catalogue, Dataset, user_sequences
from rft_genrec.evaluation.model_ranker import ModelRanker, model_directory
from rft_genrec.prompts.model_record import builder_of
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.eval import BeamSettings
from rft_models.policy.load import load_policy

_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Recommended:
    """Recommended items for one history, best first.

    Example: `Recommended(items=(4, 9), titles=("Saw", "Nail"), scores=(-1.2, -3.4))`.
    """

    items: tuple[int, ...]
    titles: tuple[str, ...]
    scores: tuple[float, ...]
    """Log-probabilities of the items' IDs; of a history without an item, shares of popularity."""
    note: str = ""
    """What was left out of the history, or that there is none; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that requests took, the newest ten thousand."""

    num: int
    p50: float
    p95: float


class Recommendations:
    """A model with its catalogue, ready to recommend.

    Example::

        shop = Recommendations.open("runs/tools/checkpoints/step_000100/model", "data/tools")
        shop.top([[3, 14]], k=5)[0].titles
    """

    def __init__(self, ranker: ModelRanker, catalogue: Catalogue, num_beams: int) -> None:
        self.catalogue, self.num_beams = catalogue, num_beams
        self._ranker = ranker
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._num = 0

    @classmethod
    def open(
        cls,
        model: str | Path,
        catalogue: str | Path,
        *,
        sid_index_path: str = "",
        item_meta_path: str = "",
        beams: BeamSettings | None = None,
        device: str = "auto",
        bf16: bool = False,
    ) -> Recommendations:
        """Load a model and the catalogue that it was trained on.

        Raises:
            DataError: the model was trained on other IDs, or the catalogue cannot be read.
            OptionsError: no such model.
        """
        place = CatalogueSettings(
            catalogue=str(catalogue), sid_index_path=sid_index_path, item_meta_path=item_meta_path
        )
        beams = beams or BeamSettings()
        dataset, ids = chosen_dataset(place)
        directory = model_directory(str(model))
        builder, where = builder_of(directory, ids), choose_device(device, 0)
        policy = load_policy(directory, dtype=weights_dtype(bf16), device=where).eval()
        ranker = ModelRanker(policy, builder, _popularity(dataset), beams, where)
        return cls(ranker, dataset.catalogue, beams.num_beams)

    def top(self, histories: Sequence[Sequence[int]], k: int = 10, *, skip_unknown: bool = False) -> list[Recommended]:
        """Return the best k items after each history, whose items are numbers of the catalogue, the newest last.

        A history without an item is answered by what is taken most. `skip_unknown` leaves items out that the catalogue
        lacks.

        Raises:
            OptionsError: an item that the catalogue lacks, or more items than beams.
        """
        if not 1 <= k <= self.num_beams:
            raise OptionsError(
                code="genrec.too_many_items",
                what=f"k = {k} with {self.num_beams} beams",
                where="k",
                why="no more items are ranked than there are beams",
                do=f"num_beams = {max(k, 1)}, or k = {self.num_beams}",
            )
        began = time.perf_counter()
        known = [self.known(history) if skip_unknown else list(history) for history in histories]
        ranked = self._ranker.rank(known, k)
        self._note(time.perf_counter() - began, len(histories))
        return [
            Recommended(
                one.items,
                tuple(self.catalogue.items[item].title for item in one.items),
                one.scores,
                _note(history, kept),
            )
            for one, history, kept in zip(ranked, histories, known, strict=True)
        ]

    def known(self, history: Sequence[int]) -> list[int]:
        """Return the items of a history that the catalogue has."""
        return [item for item in history if 0 <= item < len(self.catalogue)]

    @property
    def latencies(self) -> Latencies:
        """Median and 95th percentile of the seconds of a request; those of one call take as long as the call."""
        values = np.array(self._seconds or [0.0])
        return Latencies(self._num, float(np.percentile(values, 50)), float(np.percentile(values, 95)))

    def _note(self, seconds: float, num: int) -> None:
        self._seconds.extend([seconds] * num)
        self._num += num


def _note(history: Sequence[int], kept: Sequence[int]) -> str:
    parts: list[str] = []
    if len(kept) < len(history):
        left = [item for item in history if item not in kept]
        parts.append(f"left out {len(history) - len(kept)} unknown items: {', '.join(map(str, left[:5]))}")
    if not kept:
        parts.append("the history is empty: the items that are taken most")
    return "; ".join(parts)


def _popularity(dataset: Dataset) -> Popularity:
    """Count the first split that has samples; without any, all items are as popular."""
    samples = next((found for split in ("train", "valid", "test") if (found := dataset.of(split))), ())
    return Popularity(list(user_sequences(samples).values()), len(dataset.catalogue))
