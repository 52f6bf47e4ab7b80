"""Samples of one call of `forward_backward`, with the denominators of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rft_core.errors import OptionsError
from rft_trainer.batches.packing import count
from rft_trainer.batches.units import optimizer_batches
from rft_trainer.records.rollouts import Counts, TrainingSample

LogprobRows = Tensor | Sequence[Sequence[float]]
"""[T] over all tokens of a batch, end to end in the order of its samples; or one row a sample, one number a response
token."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Training samples and the denominators of their loss, the same on every rank.

    Micro-batches and ranks take parts of it, in whole units (a sample, or the two of a pair); every part is given
    `counts`, so that no cut changes the gradient. Samples may be left out whose gradient is exactly zero: `counts`
    keep them.

    Example::

        batch = TrainingBatch.of([TrainingSample("a", (5, 6, 7), prompt_length=1, advantage=0.5)])
        batch.counts.num_loss_tokens    # 2
    """

    samples: tuple[TrainingSample, ...]
    counts: Counts
    """Loss tokens, sequences and units of the whole batch."""
    temperature: float | None = None
    """That the samples were drawn at, by which the forward divides the logits; None = the trainer's own."""

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], *, temperature: float | None = None) -> TrainingBatch:
        """Make the batch of these samples, with their own counts."""
        return cls(tuple(samples), count(samples), temperature)

    @property
    def num_tokens(self) -> int:
        """T: tokens of all samples, prompts included."""
        return sum(sample.num_tokens for sample in self.samples)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __iter__(self) -> Iterator[TrainingSample]:
        return iter(self.samples)

    def without_zero_advantages(self) -> TrainingBatch:
        """Leave out samples whose advantages are 0; they stay in the denominators.

        For losses whose only term is the advantage's: elsewhere (a KL term, an entropy bonus) they have a gradient.
        """
        return replace(self, samples=tuple(sample for sample in self.samples if sample.has_advantage))

    def with_logprobs(self, *, old: LogprobRows | None = None, reference: LogprobRows | None = None) -> TrainingBatch:
        """Return the batch with log-probs, in nats, of the policy before the step and of a reference policy.

        Losses find them as `old_logprobs_T` and `reference_logprobs_T`.

        Raises:
            OptionsError: not as many numbers as tokens.
        """
        rows = {"old_logprobs": self._rows(old, "old"), "reference_logprobs": self._rows(reference, "reference")}
        samples = [
            replace(sample, **{name: found[index] for name, found in rows.items() if found is not None})
            for index, sample in enumerate(self.samples)
        ]
        return replace(self, samples=tuple(samples))

    def with_advantages(self, advantages: Tensor | Sequence[float]) -> TrainingBatch:
        """Return the batch with one advantage a sample, which losses find as `advantages_T` at each of its tokens.

        Raises:
            OptionsError: not as many finite numbers as samples.
        """
        numbers = [float(number) for number in advantages]
        if len(numbers) != len(self.samples) or not all(map(math.isfinite, numbers)):
            raise _refused(
                "batch.advantages",
                f"{sum(map(math.isfinite, numbers))} finite advantages for {len(self.samples)} samples",
                "every sample has one advantage, a finite number",
                f"batch.with_advantages([1.0] * {len(self.samples)})",
            )
        pairs = zip(self.samples, numbers, strict=True)
        return replace(
            self, samples=tuple(replace(one, advantage=number, token_advantages=()) for one, number in pairs)
        )

    def rows(self, values_T: Tensor) -> list[Tensor]:
        """Cut [T] values of all tokens into one tensor a sample, those of its response tokens."""
        if tuple(values_T.shape) != (self.num_tokens,):
            raise _wrong_size("values", f"a tensor of shape {tuple(values_T.shape)}", f"[T] = [{self.num_tokens}]")
        parts = values_T.split([sample.num_tokens for sample in self.samples])
        return [part[sample.prompt_length :] for part, sample in zip(parts, self.samples, strict=True)]

    def split(self, num_units: int) -> list[TrainingBatch]:
        """Cut into batches of so many units, in order, each with counts of its own: one for each optimizer step.

        A unit is a sample, or the two samples of a pair; the last batch may be smaller.
        """
        if num_units < 1:
            raise _refused("batch.split", f"split({num_units})", "a batch has at least one unit", "batch.split(1)")
        return [
            TrainingBatch.of(part, temperature=self.temperature) for part in optimizer_batches(self.samples, num_units)
        ]

    def _rows(self, values: LogprobRows | None, name: str) -> list[tuple[float, ...]] | None:
        """Return one tuple a sample, one number a response token."""
        if values is None:
            return None
        if isinstance(values, Tensor):
            return [tuple(row.tolist()) for row in self.rows(values.detach().cpu())]
        lengths = [len(row) for row in values]
        wanted = [sample.num_tokens - sample.prompt_length for sample in self.samples]
        if lengths != wanted:
            raise _wrong_size(name, f"rows of lengths {_first(lengths)}", f"{_first(wanted)} response tokens")
        return [tuple(map(float, row)) for row in values]


def _first(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _wrong_size(name: str, found: str, wanted: str) -> OptionsError:
    return _refused(
        "batch.logprobs",
        f"{name}: {found}, the batch has {wanted}",
        "log-probs are those of the batch's own tokens, in the order of its samples",
        f"batch.with_logprobs({name}=policy.logprobs(batch))"
        if name != "values"
        else "batch.rows(policy.logprobs(batch))",
    )


def _refused(code: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="TrainingBatch", why=why, state="no weight was changed", do=do)
