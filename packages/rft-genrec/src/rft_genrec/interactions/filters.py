"""Filters of interactions: titles, time window, repeats, and the k-core."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from rft_genrec.interactions.sources import InteractionTable

MOST_TITLE_WORDS = 20
FIRST_YEAR = 1996
"""The window is widened down to this year: the reviews begin in it."""


def is_title(title: str) -> bool:
    """Return whether an item with this title is kept by MiniOneRec (`data/amazon18_data_process.py`)."""
    return "<span id" not in title and len(title) > 1 and len(title.split(" ")) <= MOST_TITLE_WORDS


@dataclass(frozen=True, slots=True)
class Core:
    """Fewest interactions of users and of items."""

    user_k: int = 5
    item_k: int = 5


def in_window(table: InteractionTable, start: int | None, end: int | None) -> NDArray[np.bool_]:
    """[N] whether an interaction is not before `start` and not after `end`, in seconds since 1970; None = no bound."""
    kept_N = np.ones(len(table), dtype=np.bool_)
    if start is not None:
        kept_N &= table.times_N >= start
    if end is not None:
        kept_N &= table.times_N <= end
    return kept_N


def first_of_repeats(table: InteractionTable) -> NDArray[np.bool_]:
    """[N] whether an interaction is the earliest of its user with its item; of equal times the first in the file."""
    order_N = np.lexsort((np.arange(len(table)), table.times_N))
    pairs_N = table.users_N[order_N] * (int(table.items_N.max(initial=0)) + 1) + table.items_N[order_N]
    _, first = np.unique(pairs_N, return_index=True)
    kept_N = np.zeros(len(table), dtype=np.bool_)
    kept_N[order_N[first]] = True
    return kept_N


def k_core(table: InteractionTable, core: Core) -> tuple[InteractionTable, int]:
    """Return the largest part in which all users and items have enough interactions, and the rounds that it took."""
    rounds = 0
    while True:
        rounds += 1
        users_N = np.bincount(table.users_N, minlength=1)[table.users_N]
        items_N = np.bincount(table.items_N, minlength=1)[table.items_N]
        kept_N = (users_N >= core.user_k) & (items_N >= core.item_k)
        if kept_N.all():
            return table, rounds
        table = table.where(kept_N)


def year_before(start: int) -> int | None:
    """Return the same day a year earlier in seconds since 1970; None where that is before 1996."""
    date = datetime.fromtimestamp(start, UTC)
    if date.year <= FIRST_YEAR:
        return None
    day = 28 if (date.month, date.day) == (2, 29) else date.day
    return int(date.replace(year=date.year - 1, day=day).timestamp())
