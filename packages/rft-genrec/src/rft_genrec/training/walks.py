"""Rows that teach a model what counting and texts say: walks whose next item is drawn from both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rft_core.keyed_random import derive_key, uniforms
from rft_genrec.baselines.counters import Transitions
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.tasks import TaskRow
from rft_genrec.training.similar_items import neighbours

_OLDEST = 4
"""Items of a walk, the newest ones, that decide the next."""


@dataclass(frozen=True, slots=True)
class _Followers:
    """Items that may follow one item, with their weights summed up."""

    items_K: NDArray[np.int64]
    cumulative_K: NDArray[np.float64]

    @property
    def mass(self) -> float:
        return float(self.cumulative_K[-1]) if len(self.cumulative_K) else 0.0


class NextItems:
    """The chance of each item to follow a history, by counted transitions and by similar texts.

    With C the shares of `Transitions` and S(a, b) the shares of `neighbours`, the chance of b behind a_p, ..., a_0 is
    proportional to sum_p decay^p * (C(a_p, b) + text_weight * S(a_p, b)), over the four newest items.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        num_items: int,
        *,
        embeddings_ND: NDArray[np.floating] | None = None,
        text_weight: float = 0.0,
    ) -> None:
        """Count the sequences, whose items are in the order of time; without vectors texts play no part."""
        counted = Transitions(sequences, num_items)
        self.decay = counted.decay
        self.popular = _Followers(np.arange(num_items), np.cumsum(counted.shares_N))
        nothing = np.zeros((num_items, 0), dtype=np.int64), np.zeros((num_items, 0), dtype=np.float32)
        use_texts = embeddings_ND is not None and text_weight > 0
        nearest_NK, summed_NK = neighbours(np.asarray(embeddings_ND, dtype=np.float32)) if use_texts else nothing
        shares_NK = text_weight * np.diff(summed_NK, axis=1, prepend=0.0)
        self._followers: list[_Followers] = []
        for item in range(num_items):
            later, shares = counted.followers(item)
            items = np.concatenate([later, nearest_NK[item]])
            self._followers.append(_Followers(items, np.cumsum(np.concatenate([shares, shares_NK[item]]))))

    def draw(self, history: Sequence[int], which: float, where: float) -> int:
        """Return the next item; `which` and `where`, both in [0, 1), decide the item it follows and the one it is.

        Where nothing is known to follow any of the newest items, the item is drawn by popularity.
        """
        newest = [self._followers[item] for item in history[: -_OLDEST - 1 : -1]]
        weights = np.cumsum([self.decay**age * one.mass for age, one in enumerate(newest)])
        followers = newest[_place(weights, which)] if len(weights) and weights[-1] > 0 else self.popular
        return int(followers.items_K[_place(followers.cumulative_K, where)])


def walk_rows(
    builder: PromptBuilder, next_items: NextItems, num_items: int, *, num_walks: int, num_steps: int, seed: int
) -> Iterator[TaskRow]:
    """Yield `num_walks` walks of `num_steps` steps from every item; the model learns every item of them but the first.

    The first steps of the walks from one item are spread evenly over what follows it, so that few walks show it well.

    Args:
        builder: of prompts.
        next_items: what follows a history.
        num_items: N, items of the catalogue.
        num_walks: from each item.
        num_steps: items behind the first.
        seed: of the draws, each of which is keyed by the item at which its walk begins, the walk and the step.
    """
    for first in range(num_items):
        keys = [derive_key(seed, "walks", first, number) for number in range(num_walks)]
        draws_WSP = uniforms(keys, 2 * num_steps).numpy().reshape(num_walks, num_steps, 2)
        draws_WSP[:, 0, 1] = (draws_WSP[0, 0, 1] + np.arange(num_walks)) / num_walks
        for number, draws_SP in enumerate(draws_WSP):
            walk = [first]
            for which, where in draws_SP:
                walk.append(next_items.draw(walk, which, where))
            text = "".join(builder.response(item) for item in walk[1:])
            yield TaskRow(f"walk:{first}:{number}", builder.history_text(walk[:1]), text)


def _place(cumulative_K: NDArray[np.float64], share: float) -> int:
    place = int(np.searchsorted(cumulative_K, share * cumulative_K[-1], side="right"))
    return min(place, len(cumulative_K) - 1)
