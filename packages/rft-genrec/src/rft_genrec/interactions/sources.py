"""Sources of interactions: what each gives, and the table that they are gathered in."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rft_genrec.catalogue.records import Item

Interaction = tuple[str, str, int]
"""(user, item, seconds since 1970)."""


class Source(Protocol):
    """A place that interactions come from; each method reads its files from their beginning."""

    @property
    def name(self) -> str:
        """Name of the catalogue where the person gives none."""
        ...

    def interactions(self) -> Iterator[Interaction]:
        """Yield the interactions in the order of the files."""
        ...

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield names and texts of items; the last of a name counts."""
        ...


@dataclass(frozen=True, slots=True)
class InteractionTable:
    """Interactions as numbers, in the order of the files: entry n of each array is of interaction n."""

    users_N: NDArray[np.int64]
    items_N: NDArray[np.int64]
    times_N: NDArray[np.int64]
    """Seconds since 1970 (UTC)."""
    user_names: list[str] = field(repr=False)
    item_names: list[str] = field(repr=False)

    def __len__(self) -> int:
        return len(self.times_N)

    def where(self, kept_N: NDArray[np.bool_]) -> InteractionTable:
        """Return the interactions that a mask keeps; users and items keep their numbers."""
        return replace(self, users_N=self.users_N[kept_N], items_N=self.items_N[kept_N], times_N=self.times_N[kept_N])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of users, items and interactions that are left."""
        return len(np.unique(self.users_N)), len(np.unique(self.items_N)), len(self)


def gathered(interactions: Iterable[Interaction]) -> InteractionTable:
    """Gather interactions: 24 bytes each, and every name once."""
    users, items, times = array("q"), array("q"), array("q")
    user_numbers: dict[str, int] = {}
    item_numbers: dict[str, int] = {}
    for user, item, time in interactions:
        users.append(user_numbers.setdefault(user, len(user_numbers)))
        items.append(item_numbers.setdefault(item, len(item_numbers)))
        times.append(time)
    return InteractionTable(_numbers(users), _numbers(items), _numbers(times), [*user_numbers], [*item_numbers])


def _numbers(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)


def texts_of(source: Source, wanted: Mapping[str, int]) -> list[Item | None]:
    """Return the texts of the items that are wanted, at their numbers; None where the source has none."""
    texts: list[Item | None] = [None] * len(wanted)
    for name, item in source.items():
        if name in wanted:
            texts[wanted[name]] = item
    return texts
