"""Units of a step: what is never divided, and how units are cut into micro-batches.

A unit is one sample, or several that a loss compares with one another: the chosen and the rejected answer of a
preference, the beams of one prompt. Samples that stand next to each other with the same `TrainingSample.unit` are one;
a sample without a unit is one by itself. Optimizer steps, ranks and micro-batches take whole units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rft_core.errors import OptionsError
from rft_trainer.records.rollouts import TrainingSample

Unit = tuple[TrainingSample, ...]


def units_of(samples: Sequence[TrainingSample]) -> list[Unit]:
    """Group samples into units, in order."""
    units: list[list[TrainingSample]] = []
    for sample in samples:
        if units and sample.unit and units[-1][0].unit == sample.unit:
            units[-1].append(sample)
        else:
            units.append([sample])
    return [tuple(unit) for unit in units]


def unit_lengths(units: Sequence[Unit]) -> list[int]:
    """Return the number of tokens of each unit."""
    return [sum(sample.num_tokens for sample in unit) for unit in units]


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Limits of one rank's micro-batches. `by_tokens` fills to `max_tokens`; else at most `max_sequences`, in order.

    `max_sequences` counts units: a pair of answers is one.
    """

    max_sequences: int
    max_tokens: int
    by_tokens: bool
    lowered: bool = False
    """Whether the run itself made the limit smaller: a longer unit is then a micro-batch, and no error."""

    def cut(self, num_tokens: Sequence[int]) -> list[list[int]]:
        """Split units of these lengths into micro-batches; return the indices of each."""
        if self.by_tokens:
            budget = self._budget(num_tokens)
            return split_by_tokens(num_tokens, budget) if num_tokens else []
        return split_in_order(num_tokens, self.max_sequences, self.max_tokens)

    def halved(self, samples: Sequence[TrainingSample]) -> MicroBatching | None:
        """Return limits of half as much, for a step on these samples; None where a micro-batch is one unit already."""
        lengths = unit_lengths(units_of(samples))
        longest = max(lengths, default=0)
        if self.by_tokens:
            budget = self._budget(lengths)
            # the longest unit is never divided, so no budget is below it
            half = max(budget // 2, longest)
            return replace(self, max_tokens=half, lowered=True) if half < budget else None
        # the most units that a micro-batch has: a cap on tokens may keep it below `max_sequences`
        most = max((len(indices) for indices in self.cut(lengths)), default=1)
        return replace(self, max_sequences=(most + 1) // 2) if most > 1 else None

    def half_as_flags(self, samples: Sequence[TrainingSample]) -> str:
        """Return the flags of a run with micro-batches half as large for a step on these samples; empty as `halved`."""
        smaller = self.halved(samples)
        if smaller is None:
            return ""
        if not self.by_tokens:
            return f"--micro_train_batch_size {smaller.max_sequences}"
        # a number of sequences: another step may have a unit that is longer than half of the tokens
        longest = max(unit_lengths(units_of(samples)))
        return f"--no-packing_samples --micro_train_batch_size {smaller.max_tokens // longest}"

    def _budget(self, num_tokens: Sequence[int]) -> int:
        longest = max(num_tokens, default=0)
        # without a cap: as many tokens as the largest micro-batch in order may have
        budget = self.max_tokens or self.max_sequences * longest
        return max(budget, longest) if self.lowered else budget

    def __str__(self) -> str:
        """Say the limits in words."""
        if self.by_tokens:
            return (
                f"{self.max_tokens:,} tokens" if self.max_tokens else f"{self.max_sequences} times the longest sample"
            )
        return f"{self.max_sequences} samples" + (f", {self.max_tokens:,} tokens" if self.max_tokens else "")


def split_in_order(num_tokens: Sequence[int], max_sequences: int, max_tokens: int) -> list[list[int]]:
    """Split units into micro-batches in the given order, each closed when the next unit would exceed either cap.

    `max_tokens` 0 means no cap on tokens.
    """
    _check_fits(num_tokens, max_tokens)
    cuts: list[list[int]] = []
    tokens = 0
    for index, length in enumerate(num_tokens):
        if not cuts or len(cuts[-1]) == max_sequences or (max_tokens and tokens + length > max_tokens):
            cuts.append([])
            tokens = 0
        cuts[-1].append(index)
        tokens += length
    return cuts


def split_by_tokens(num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split units into micro-batches filled to `max_tokens`, by first-fit decreasing."""
    _check_fits(num_tokens, max_tokens)
    cuts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        # first fit: the earliest micro-batch with room; longest units come first, so gaps are filled by short ones
        slot = next((s for s, free in enumerate(room) if free >= num_tokens[index]), None)
        if slot is None:
            cuts.append([])
            room.append(max_tokens)
            slot = len(cuts) - 1
        cuts[slot].append(index)
        room[slot] -= num_tokens[index]
    return [sorted(indices) for indices in cuts]


def optimizer_batches(samples: Sequence[TrainingSample], batch_size: int) -> list[list[TrainingSample]]:
    """Split samples into those of each optimizer step, in order; the last may be smaller, with its own denominator.

    `batch_size` counts units.
    """
    units = units_of(samples)
    starts = range(0, len(units), batch_size)
    return [[sample for unit in units[start : start + batch_size] for sample in unit] for start in starts]


def _check_fits(num_tokens: Sequence[int], max_tokens: int) -> None:
    longest = max(num_tokens, default=0)
    if max_tokens and longest > max_tokens:
        raise OptionsError(
            code="batch.sample_over_token_cap",
            what=f"one sample has {longest} tokens, max_tokens_per_micro_batch = {max_tokens}",
            where="--max_tokens_per_micro_batch",
            why="a sample is never cut in two, so the cap must hold the longest one",
            state="the step was not taken",
            do=f"--max_tokens_per_micro_batch {longest}",
        )
