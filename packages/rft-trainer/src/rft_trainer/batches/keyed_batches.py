"""Batches of rows that are drawn for a number, such as that of an update: no state, so that a resume draws the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.records.rollouts import TrainingSample


@dataclass(frozen=True, slots=True)
class KeyedBatches:
    """Batches along the epochs of rows, one epoch after the other.

    Example: 5 rows and batches of 2 give the positions 0 1, 2 3, 4 0', 1' 2', ... where ' is the second epoch.
    """

    samples: Sequence[TrainingSample]
    order: Callable[[int], Sequence[int]]
    """Indices of the samples in an epoch, a function of the epoch alone."""
    size: int
    """Rows of a batch, at most one epoch."""

    def batch(self, number: int) -> TrainingBatch:
        """Return the batch of a number, from 0, with its own counts; every rank gets the same."""
        num = len(self.samples)
        positions = [divmod(position, num) for position in range(number * self.size, (number + 1) * self.size)]
        orders = {epoch: self.order(epoch) for epoch in dict.fromkeys(epoch for epoch, _ in positions)}
        return TrainingBatch.of([self.samples[int(orders[epoch][place])] for epoch, place in positions])
