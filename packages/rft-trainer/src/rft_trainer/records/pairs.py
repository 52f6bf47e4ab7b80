"""Label of a pair of responses: which is better under each head of a reward model, by how much, and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

# workers that tokenise pairs start without torch, which takes seconds
if TYPE_CHECKING:
    from torch import Tensor

FIRST_IS_BETTER, EQUAL, SECOND_IS_BETTER, UNLABELLED = 1.0, 0.0, -1.0, 2.0
"""Outcomes of a comparison under one head."""


@dataclass(frozen=True, slots=True)
class PairLabel:
    """Label of one pair, which both of its samples carry as `TrainingSample.sequence_numbers`.

    Example: `PairLabel(outcomes=(1.0,), margin=0.5)`: the first response is better, by half a point at least.
    """

    outcomes: tuple[float, ...]
    """One a head: 1 the first response is better, -1 the second, 0 they are equal, 2 nobody has said."""
    margin: float = 0.0
    """By how much the better one should score above the other."""
    weight: float = 1.0
    """Factor on the loss of the pair."""

    def as_numbers(self) -> tuple[float, ...]:
        """Return margin, weight, and the outcomes."""
        return (self.margin, self.weight, *self.outcomes)


@dataclass(frozen=True, slots=True)
class PairLabels:
    """Labels of the pairs of a batch."""

    outcomes_PK: Tensor
    margins_P: Tensor
    weights_P: Tensor

    @classmethod
    def of(cls, numbers_PN: Tensor) -> PairLabels:
        """Take the rows that `PairLabel.as_numbers` made apart."""
        return cls(numbers_PN[:, 2:], numbers_PN[:, 0], numbers_PN[:, 1])

    @property
    def decided_PK(self) -> Tensor:
        """Bool: one of the two is better."""
        return self.outcomes_PK.abs() == 1

    @property
    def tied_PK(self) -> Tensor:
        """Bool: they were judged equal."""
        return self.outcomes_PK == EQUAL

    def better_first(self, first_PK: Tensor, second_PK: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange scores where the second response is the better one: (of the better, of the worse)."""
        swapped_PK = self.outcomes_PK == SECOND_IS_BETTER
        return second_PK.where(swapped_PK, first_PK), first_PK.where(swapped_PK, second_PK)


def head_names(heads: Sequence[str], name: str) -> list[str]:
    """Return the names of a metric of each head: the metric itself where there is one head alone."""
    return [f"{name}_{head}" for head in heads] if len(heads) > 1 else [name]
