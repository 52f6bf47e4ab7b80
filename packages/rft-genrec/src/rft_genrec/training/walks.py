"""Rows that teach a model what counting and texts say: walks whose next item is drawn from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
_GOLDEN_RATIO = (5**0.5 - 1) / 2


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
    builder: PromptBuilder,
    next_items: NextItems,
    histories: Mapping[str, Sequence[int]],
    *,
    num_walks: int,
    num_steps: int,
    seed: int,
) -> Iterator[TaskRow]:
    """Yield `num_walks` walks of `num_steps` drawn items behind every history; the model learns the drawn items.

    The first steps of the walks behind one history are spread evenly over what follows it, so that few show it well.

    Args:
        builder: of prompts.
        next_items: what follows a history.
        histories: items in the order of time, by a name for their rows.
        num_walks: behind each history.
        num_steps: items that are drawn for a walk.
        seed: of the draws, each of which is keyed by the number of its history, the walk and the step.
    """
    for place, (name, history) in enumerate(histories.items()):
        keys = [derive_key(seed, "walks", place, number) for number in range(num_walks)]
        draws_WSP = uniforms(keys, 2 * num_steps).numpy().reshape(num_walks, num_steps, 2)
        # points of a lattice: along either axis no two are close to one another
        numbers_W = np.arange(num_walks)
        draws_WSP[:, 0, 0] = (draws_WSP[0, 0, 0] + numbers_W * _GOLDEN_RATIO) % 1
        draws_WSP[:, 0, 1] = (draws_WSP[0, 0, 1] + numbers_W) / num_walks
        for number, draws_SP in enumerate(draws_WSP):
            walk = list(history)
            for which, where in draws_SP:
                walk.append(next_items.draw(walk, which, where))
            text = "".join(builder.response(item) for item in walk[len(history) :])
            yield TaskRow(f"walk:{name}:{number}", builder.history_text(history), text)


def known_histories(sequences: Sequence[Sequence[int]], max_history: int) -> dict[str, tuple[int, ...]]:
    """Return the distinct histories of two items and more that the sequences show, cut to their newest items."""
    found: dict[tuple[int, ...], None] = {}
    for sequence in sequences:
        for end in range(2, len(sequence) + 1):
            found[tuple(sequence[max(0, end - max_history) if max_history else 0 : end])] = None
    return {f"history:{place}": history for place, history in enumerate(found)}


def _place(cumulative_K: NDArray[np.float64], share: float) -> int:
    place = int(np.searchsorted(cumulative_K, share * cumulative_K[-1], side="right"))
    return min(place, len(cumulative_K) - 1)
