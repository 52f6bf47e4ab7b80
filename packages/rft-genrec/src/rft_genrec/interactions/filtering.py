"""The filters of `rft-train genrec data` one after the other, each with a line on what it leaves."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import numpy as np

from rft_genrec.interactions.filters import Core, first_of_repeats, in_window, is_title, k_core, year_before
from rft_genrec.interactions.sources import InteractionTable
from rft_genrec.settings.data import FilterSettings
from rft_genrec.settings.data_rules import seconds_of

Filtered = Generator[str, None, InteractionTable]
"""Lines on what each filter leaves, and at the end the interactions."""


def filtered(table: InteractionTable, titles: Mapping[str, str] | None, wanted: FilterSettings) -> Filtered:
    """Return the interactions that the filters leave.

    Args:
        table: all interactions.
        titles: titles by the names of the items; None = none is left out by its title.
        wanted: the filters.
    """
    if titles is not None:
        good = np.array([is_title(titles.get(name, "")) for name in table.item_names], dtype=np.bool_)
        table = table.where(good[table.items_N])
        yield _line("with a title", table)
    start, end = (seconds_of(date) if date else None for date in (wanted.start_date, wanted.end_date))
    core = Core(wanted.user_k, wanted.item_k)
    while True:
        kept = table.where(in_window(table, start, end))
        if start is not None or end is not None:
            yield _line("in the window", kept)
        if wanted.repeats == "merge":
            kept = kept.where(first_of_repeats(kept))
            yield _line("without repeats", kept)
        kept, rounds = k_core(kept, core)
        yield f"{_line(f'of users with {core.user_k} and items with {core.item_k}', kept)} after {rounds} rounds"
        earlier = year_before(start) if start is not None and kept.counts[1] < wanted.min_items else None
        if earlier is None:
            return kept
        start = earlier
        yield f"fewer than {wanted.min_items:,} items: the window begins a year earlier"


def _line(what: str, table: InteractionTable) -> str:
    users, items, interactions = table.counts
    return f"{what}: {users:,} users, {items:,} items, {interactions:,} interactions"
