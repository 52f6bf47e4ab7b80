"""Checks that a test says something of the future: what training samples reveal of validation and test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rft_genrec.catalogue.records import Sample, SplitName

Key = tuple[str, tuple[int, ...], int]
"""(user, history, target)."""
_LATER: dict[SplitName, tuple[SplitName, ...]] = {"train": ("valid", "test"), "valid": ("test",), "test": ()}


@dataclass(frozen=True, slots=True)
class Leakage:
    """Counts over the samples of a data set."""

    late_targets: dict[tuple[SplitName, SplitName], int]
    """(earlier, later) -> samples of the earlier split whose target comes after the first target of the later one.
    Empty where times are not known."""
    shared_samples: dict[tuple[SplitName, SplitName], int]
    """(earlier, later) -> samples of the later split that are in the earlier one too: user, history and target."""
    duplicates: dict[SplitName, int]
    """Samples of a split that are in it once more."""
    unseen_items: dict[SplitName, int]
    """Samples of validation and test whose target is in no training sample, be it as history or as target."""
    sizes: dict[SplitName, int]

    def lines(self) -> Iterator[str]:
        """Yield what is said of them, a line a check."""
        for (earlier, later), count in self.late_targets.items():
            yield f"{earlier} targets after the first {later} target: {_share(count, self.sizes[earlier])}"
        for (earlier, later), count in self.shared_samples.items():
            yield f"{later} samples that are {earlier} samples too: {_share(count, self.sizes[later])}"
        for split, count in self.duplicates.items():
            yield f"{split} samples that are there twice: {_share(count, self.sizes[split])}"
        for split, count in self.unseen_items.items():
            yield f"{split} targets that training never shows: {_share(count, self.sizes[split])}"


def check_leakage(samples: Mapping[SplitName, Sequence[Sample]]) -> Leakage:
    """Count what the splits share, and which targets are out of the order of time."""
    keys: dict[SplitName, list[Key]] = {
        split: [(s.user, s.history, s.target) for s in rows] for split, rows in samples.items() if rows
    }
    sets = {split: set(rows) for split, rows in keys.items()}
    pairs: list[tuple[SplitName, SplitName]] = [
        (earlier, later) for earlier in keys for later in _LATER[earlier] if later in keys
    ]
    dated = all(sample.time for rows in samples.values() for sample in rows)
    firsts = {split: min(sample.time for sample in samples[split]) for split in keys}
    train = samples.get("train", ())
    seen = {item for sample in train for item in (*sample.history, sample.target)}
    return Leakage(
        late_targets={
            (earlier, later): sum(sample.time > firsts[later] for sample in samples[earlier])
            for earlier, later in pairs
            if dated
        },
        shared_samples={(a, b): sum(key in sets[a] for key in keys[b]) for a, b in pairs},
        duplicates={split: len(rows) - len(sets[split]) for split, rows in keys.items()},
        unseen_items={
            split: sum(sample.target not in seen for sample in samples[split])
            for split in keys
            if split != "train" and train
        },
        sizes={split: len(rows) for split, rows in keys.items()},
    )


def _share(count: int, of: int) -> str:
    return f"{count:,} of {of:,} ({100 * count / of:.1f} %)" if of else "none"
