"""Rows of preference training as samples of a step: with the reference's log-probs and with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rft_algos.losses.preference import kto_reference_point
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.reference_logprobs import LogprobTable, ReferenceLogprobs, Score


@dataclass(slots=True, kw_only=True)
class PreferenceRows:
    """Pairs, or labelled responses, to train on and to evaluate on.

    The advantage of a sample is the weight of its row, of a bad labelled response below 0.
    """

    samples: Sequence[TrainingSample]
    """To train on: `samples_a_row` samples a row, of a pair the chosen and the rejected response."""
    held_out: Sequence[TrainingSample]
    samples_a_row: int
    mismatched: Sequence[TrainingSample] = ()
    """A sample a row whose response belongs to another prompt (KTO); empty where the loss needs none."""
    held_out_mismatched: Sequence[TrainingSample] = ()
    reference: ReferenceLogprobs | None = None
    """None where the loss compares with no reference."""
    _table: LogprobTable | None = field(default=None, init=False)

    @property
    def num_rows(self) -> int:
        """Number of rows to train on."""
        return len(self.samples) // self.samples_a_row

    def begin(self) -> None:
        """Get the reference's log-probs of all samples; every rank calls it, before the first step."""
        if self.reference is not None and self._table is None:
            everything = [*self.samples, *self.held_out, *self.mismatched, *self.held_out_mismatched]
            self._table = self.reference(everything)

    def of_step(self, rows: Sequence[int]) -> list[TrainingSample]:
        """Return the samples of the rows of one step, their weights divided by the mean weight of the step."""
        size = self.samples_a_row
        chosen = [row * size + offset for row in rows for offset in range(size)]
        weights = [abs(self.samples[index].advantage) for index in chosen]
        mean = sum(weights) / len(weights)
        # a row that is drawn twice in a step, where several sources are mixed, is two units
        return [self._sample(index, mean, place // size) for place, index in enumerate(chosen)]

    def reference_point(self, score: Score, rows: Sequence[int]) -> float:
        """Compute the reference point z of KTO from some rows, in nats; every rank calls it, and gets the same."""
        first = len(self.samples) + len(self.held_out)
        return self._point(score, [self.mismatched[row] for row in rows], [first + row for row in rows])

    def held_out_reference_point(self, score: Score) -> float:
        """Compute z from the held-out rows, as `reference_point`."""
        first = len(self.samples) + len(self.held_out) + len(self.mismatched)
        return self._point(score, self.held_out_mismatched, range(first, first + len(self.held_out_mismatched)))

    def held_out_table(self) -> LogprobTable | None:
        """Return the reference's log-probs of the held-out samples; None without a reference."""
        table, first = self._table, len(self.samples)
        if table is None:
            return None
        start = table.ends[first - 1] if first else 0
        ends = table.ends[first : first + len(self.held_out)]
        return LogprobTable(table.values_N[start : ends[-1] if ends else start], tuple(end - start for end in ends))

    def _sample(self, index: int, mean: float, place: int) -> TrainingSample:
        sample = self.samples[index]
        reference = self._table.row(index) if self._table is not None else ()
        unit = f"{place} {sample.unit}" if sample.unit else ""
        return replace(sample, advantage=sample.advantage / mean, reference_logprobs=reference, unit=unit)

    def _point(self, score: Score, samples: Sequence[TrainingSample], places: Sequence[int]) -> float:
        table = self._table
        reference = [sum(table.row(place)) if table is not None else 0.0 for place in places]
        # of all rows at once: a mean of means, each clamped at 0, is another number
        total = sum(sum(row) - other for row, other in zip(score(samples), reference, strict=True))
        return float(kto_reference_point(total, len(samples)))
