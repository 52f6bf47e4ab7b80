"""Items, their semantic IDs, and samples of the items that people took.

Items are numbered from 0 without gaps; every table is indexed by that number.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a catalogue and its texts."""

    title: str
    description: str = ""
    brand: str = ""
    categories: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Title and description, as encoders read them."""
        return f"{self.title} {self.description}".strip()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Items of one data set; an item's number is its place.

    Example: `Catalogue("tools", (Item("Hammer"), Item("Saw")))` has the items 0 and 1.
    """

    name: str
    items: tuple[Item, ...]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class SemanticIds:
    """The semantic ID of every item: its tokens, from the coarsest level to the finest.

    Example: `SemanticIds((("<a_1>", "<b_0>"), ("<a_1>", "<b_3>")))`. IDs of an item may be of different lengths, and
    several items may share one.
    """

    tokens_by_item: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.tokens_by_item)

    def text(self, item: int) -> str:
        """Return the ID of an item as a model writes it."""
        return "".join(self.tokens_by_item[item])

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Distinct tokens, sorted as text: the order in which they are added to a vocabulary."""
        return tuple(sorted({token for tokens in self.tokens_by_item for token in tokens}))

    @cached_property
    def items_by_id(self) -> Mapping[tuple[str, ...], tuple[int, ...]]:
        """Items of each distinct ID, in ascending order; IDs in the order of their first item."""
        items: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for item, tokens in enumerate(self.tokens_by_item):
            items[tokens].append(item)
        return {tokens: tuple(numbers) for tokens, numbers in items.items()}

    @property
    def collision_rate(self) -> float:
        """Return (items - distinct IDs) / items."""
        return (len(self) - len(self.items_by_id)) / len(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all IDs in the order of the items."""
        return hashlib.sha256(json.dumps(self.tokens_by_item).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Sample:
    """One prediction: the items that a person took before, and the next one.

    Example: `Sample("valid:0", "A12", history=(4, 9), target=7)`.
    """

    sample_id: str
    """Unique in its data set: predictions, targets and rewards are joined by it and by nothing else."""
    user: str
    history: tuple[int, ...]
    """Items in the order of time, the last one newest."""
    target: int
    time: int = 0
    """Seconds since 1970 (UTC) of the target; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A catalogue with the samples of its splits; what a directory lacks is empty."""

    catalogue: Catalogue
    ids: SemanticIds | None
    samples: Mapping[SplitName, tuple[Sample, ...]] = field(default_factory=dict)

    def of(self, split: SplitName) -> tuple[Sample, ...]:
        """Return the samples of a split; none where the data set lacks it."""
        return self.samples.get(split, ())


def user_sequences(samples: Iterable[Sample], *, with_targets: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the longest sequence that the samples reveal of every user, users in the order of their first sample.

    A sample reveals its history and, unless `with_targets` is false, its target. Histories that are cut to their
    newest items are joined where they overlap: what one has in front of another is put before it.
    """
    sequences: dict[str, tuple[int, ...]] = {}
    for sample in samples:
        revealed = (*sample.history, sample.target) if with_targets else sample.history
        known = sequences.get(sample.user)
        sequences[sample.user] = revealed if known is None else _joined(known, revealed)
    return {user: sequence for user, sequence in sequences.items() if sequence}


def _joined(known: Sequence[int], revealed: Sequence[int]) -> tuple[int, ...]:
    """Return one sequence of two that overlap: the end of the first is the beginning of the second, or holds it."""
    for start in range(len(known) + 1):
        overlap = known[start:]
        if tuple(overlap) == tuple(revealed[: len(overlap)]):
            return (*known[:start], *revealed)
        if tuple(overlap[: len(revealed)]) == tuple(revealed):
            return tuple(known)
    raise AssertionError("the empty end of a sequence begins every other")
