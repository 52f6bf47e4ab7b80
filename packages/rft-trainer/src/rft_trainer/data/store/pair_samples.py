"""Pairs of responses in a store: two samples a pair, the chosen and the rejected response, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.records.rollouts import TrainingSample

RESPONSES = ("chosen", "rejected")

MakeSample = Callable[[TrainingSample, str, int], TrainingSample]
"""(sample as it is stored, with the id of its pair; "chosen" or "rejected"; response tokens of the other one) -> the
sample that a stage trains on."""


class PairSamples(Sequence[TrainingSample]):
    """Both samples of every pair in turn, each made from the memory map when it is asked for."""

    def __init__(self, stored: StoredSamples, make: MakeSample) -> None:
        self.stored, self._make = stored, make

    def __len__(self) -> int:
        """Return the number of samples, two a pair."""
        return len(self.stored)

    def picked(self, pairs: Iterable[int]) -> PairSamples:
        """Return the samples of these pairs, in this order."""
        return PairSamples(self.stored.picked(2 * pair + part for pair in pairs for part in (0, 1)), self._make)

    @overload
    def __getitem__(self, index: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSample]: ...
    def __getitem__(self, index: int | slice) -> TrainingSample | list[TrainingSample]:
        """Make the sample, or the list of samples."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._make(self.stored[number], RESPONSES[number % 2], self.stored.num_response_tokens(number ^ 1))


class PairUnits(Sequence[tuple[TrainingSample, ...]]):
    """The pairs, each as the unit of its two samples."""

    def __init__(self, samples: PairSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._samples) // 2

    @overload
    def __getitem__(self, index: int) -> tuple[TrainingSample, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[TrainingSample, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[TrainingSample, ...] | list[tuple[TrainingSample, ...]]:
        """Make the pair, or the list of pairs."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._samples[2 * number], self._samples[2 * number + 1]
