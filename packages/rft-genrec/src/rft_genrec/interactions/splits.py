"""Numbered sequences of users, the samples that they give, and how samples are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rft_genrec.catalogue.records import Sample, SplitName
from rft_genrec.interactions.sources import InteractionTable

SplitSamples = dict[SplitName, tuple[Sample, ...]]
_FEWEST_TO_LEAVE_OUT = 3
"""Interactions of a user of which one is left for validation and one for the test."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Items of every user in the order of time; users and items are numbered from 0 by first appearance."""

    items: tuple[tuple[int, ...], ...]
    times: tuple[tuple[int, ...], ...]
    """Seconds since 1970 of each interaction, beside `items`."""
    user_names: tuple[str, ...]
    item_names: tuple[str, ...]

    @property
    def num_interactions(self) -> int:
        """Return the number of interactions of all users."""
        return sum(map(len, self.items))


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the samples."""

    valid: float = 0.1
    test: float = 0.1


def numbered(table: InteractionTable) -> Sequences:
    """Sort every user's interactions by time, and number users and items anew.

    Users come in the order of the files; interactions of one time stay in it; items are numbered as the sequences of
    the users, one after the other, name them first. This is the numbering of MiniOneRec.
    """
    _, first, users_N = np.unique(table.users_N, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    ranks_N = rank[users_N]
    order_N = np.lexsort((np.arange(len(table)), table.times_N, ranks_N))
    old_N, times_N = table.items_N[order_N].tolist(), table.times_N[order_N].tolist()
    numbers: dict[int, int] = {}
    new_N = [numbers.setdefault(item, len(numbers)) for item in old_N]
    ends = np.cumsum(np.bincount(ranks_N, minlength=len(first))).tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
    users = table.users_N[np.sort(first)].tolist()
    return Sequences(
        items=tuple(tuple(new_N[start:end]) for start, end in bounds),
        times=tuple(tuple(times_N[start:end]) for start, end in bounds),
        user_names=tuple(table.user_names[user] for user in users),
        item_names=tuple(table.item_names[item] for item in numbers),
    )


def samples_of(sequences: Sequences, max_history: int) -> list[tuple[int, Sample]]:
    """Return (items that come after it, sample) for each item of a user but the first, users one after the other."""
    samples: list[tuple[int, Sample]] = []
    for user, (items, times) in enumerate(zip(sequences.items, sequences.times, strict=True)):
        for place in range(1, len(items)):
            history = items[max(0, place - max_history) : place]
            samples.append((len(items) - 1 - place, Sample("", f"A{user}", history, items[place], times[place])))
    return samples


def split_by_time(sequences: Sequences, max_history: int, shares: Shares) -> SplitSamples:
    """Divide the samples by the times of their targets; those of equal times stay in the order of the users."""
    samples = [sample for _, sample in samples_of(sequences, max_history)]
    samples.sort(key=lambda sample: sample.time)
    # rounded, since 1 - 0.1 - 0.1 is a little more than 0.8
    first_valid = int(len(samples) * round(1 - shares.valid - shares.test, 9))
    first_test = int(len(samples) * round(1 - shares.test, 9))
    return _named(samples[:first_valid], samples[first_valid:first_test], samples[first_test:])


def split_last_out(sequences: Sequences, max_history: int) -> SplitSamples:
    """Take the last item of every user for the test and the last but one for validation; two items are for training."""
    parts: dict[SplitName, list[Sample]] = {"train": [], "valid": [], "test": []}
    for after, sample in samples_of(sequences, max_history):
        length = len(sequences.items[int(sample.user[1:])])
        last_two: dict[int, SplitName] = {0: "test", 1: "valid"} if length >= _FEWEST_TO_LEAVE_OUT else {}
        parts[last_two.get(after, "train")].append(sample)
    return _named(parts["train"], parts["valid"], parts["test"])


def _named(train: Sequence[Sample], valid: Sequence[Sample], test: Sequence[Sample]) -> SplitSamples:
    parts: dict[SplitName, Sequence[Sample]] = {"train": train, "valid": valid, "test": test}
    return {
        split: tuple(
            Sample(f"{split}:{number}", old.user, old.history, old.target, old.time)
            for number, old in enumerate(samples)
        )
        for split, samples in parts.items()
    }
