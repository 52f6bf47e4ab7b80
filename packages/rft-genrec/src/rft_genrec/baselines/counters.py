"""Recommenders that count: popularity, transitions from item to item, neighbours that occur together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rft_genrec.baselines.recommender import ScoredRanking, Scores

_Rows = Mapping[int, tuple[np.ndarray, np.ndarray]]


def item_shares(sequences: Sequence[Sequence[int]], num_items: int) -> Scores:
    """[N]: (count + 1) / (all counts + N) of every item in all sequences."""
    counts = np.bincount(np.array([i for s in sequences for i in s], dtype=np.int64), minlength=num_items) + 1.0
    return counts / counts.sum()


class Popularity(ScoredRanking):
    """The items that were taken most, whatever the history is."""

    def __init__(self, sequences: Sequence[Sequence[int]], num_items: int) -> None:
        self.num_items = num_items
        self.shares_N = item_shares(sequences, num_items)

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return the shares of the items, the same for each history."""
        return np.repeat(self.shares_N[None], len(histories), axis=0)


class Transitions(ScoredRanking):
    """Transitions over up to n steps, decayed by their distance and by the age of the history's items.

    With C(a, b) the sum of 1 / d over all pairs of a sequence in which b comes d <= n places behind a,
    score(b) = sum_p decay^p * C(a_p, b) / (sum_c C(a_p, c) + smoothing) + weight * popularity(b),
    where a_0 is the newest item of the history, a_1 the one before it. With n = 1 and decay = 0 the newest item alone
    decides: a first-order Markov chain. A history without an item ranks by popularity.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        num_items: int,
        *,
        num_steps: int = 3,
        decay: float = 0.5,
        smoothing: float = 5.0,
        popularity_weight: float = 1e-3,
    ) -> None:
        """Count the sequences, whose items are in the order of time."""
        self.num_items, self.decay, self._weight = num_items, decay, popularity_weight
        self.shares_N = item_shares(sequences, num_items)
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for sequence in sequences:
            for place, item in enumerate(sequence):
                for distance, later in enumerate(sequence[place + 1 : place + 1 + num_steps], start=1):
                    counts[item][later] += 1 / distance
        self._rows = _as_rows(counts, smoothing)

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return [H, N] sums of transition shares and the popularity term."""
        scores_HN = np.repeat(self._weight * self.shares_N[None], len(histories), axis=0)
        for row, history in zip(scores_HN, histories, strict=True):
            weight = 1.0
            for item in reversed(history):
                if item in self._rows:
                    later, shares = self._rows[item]
                    row[later] += weight * shares
                weight *= self.decay
                if not weight:
                    break
        return scores_HN

    def followers(self, item: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the items that were counted behind an item, and their shares; both are empty where there are none."""
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return self._rows.get(item, nothing)


class ItemNeighbours(ScoredRanking):
    """Items that the same people took: the sum of cosines with the items of the history.

    cosine(a, b) = users of both / sqrt(users of a * users of b); score(b) = sum over distinct a of the history, plus a
    small popularity term.

    Source: Sarwar et al. 2001, "Item-based collaborative filtering recommendation algorithms".
    """

    def __init__(self, sequences: Sequence[Sequence[int]], num_items: int, *, popularity_weight: float = 1e-3) -> None:
        self.num_items, self._weight = num_items, popularity_weight
        self.shares_N = item_shares(sequences, num_items)
        users: Counter[int] = Counter()
        both: dict[int, Counter[int]] = defaultdict(Counter)
        for sequence in sequences:
            items = sorted(set(sequence))
            users.update(items)
            for item in items:
                both[item].update(other for other in items if other != item)
        self._rows: _Rows = {
            item: (
                np.array([*row]),
                np.array([num / (users[item] * users[other]) ** 0.5 for other, num in row.items()]),
            )
            for item, row in both.items()
            if row
        }

    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return [H, N] sums of cosines and the popularity term."""
        scores_HN = np.repeat(self._weight * self.shares_N[None], len(histories), axis=0)
        for row, history in zip(scores_HN, histories, strict=True):
            for item in dict.fromkeys(history):
                if item in self._rows:
                    others, cosines = self._rows[item]
                    row[others] += cosines
        return scores_HN


def _as_rows(counts: Mapping[int, Mapping[int, float]], smoothing: float) -> _Rows:
    return {
        item: (np.array([*row]), np.array([*row.values()], dtype=np.float64) / (sum(row.values()) + smoothing))
        for item, row in counts.items()
    }
