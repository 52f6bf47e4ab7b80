"""One optimizer step: split the units, run each micro-batch forward and backward, then step once.

The loss is a function of one packed micro-batch and the denominators of the whole step, so the sum over
micro-batches and ranks is the gradient of the whole. Every model that is trained goes through here: a policy on
rewards or on demonstrations, a critic, a reward model. What differs between them is their `MicroBatchLoss`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_core.errors import ServiceError
from rft_trainer.batches.out_of_memory import is_out_of_memory, no_room_in_collective, no_split_left
from rft_trainer.batches.packing import count, filler_batches, pack, rank_micro_batches
from rft_trainer.batches.units import MicroBatching, units_of
from rft_trainer.metrics.totals import Mark, MetricTotals
from rft_trainer.protocols import Collectives, Optimizer
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.update.numeric_guard import Diagnosis, NumericGuard

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MicroBatchOutput:
    """Result of a model on one micro-batch."""

    loss: Tensor
    """Scalar with gradient: the micro-batch's share of the loss of the step, the sum of all its terms."""
    outputs_T: Tensor
    """[T]: what the model says of each token (log-probs, values); no gradient is taken of it."""


class MicroBatchLoss(Protocol):
    """The losses of one model that is trained, and what goes before and after the micro-batches of a step."""

    @property
    def model(self) -> object:
        """The model that is trained."""
        ...

    @property
    def prepass(self) -> bool:
        """Return whether `begin` wants every micro-batch of the step before the first backward."""
        ...

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        """Look at this rank's micro-batches of the whole step; every rank calls it where `prepass` holds.

        `idle` batches match the other ranks' collectives: they are computed, and do not count.
        """
        ...

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        """Compute the loss of a micro-batch with the denominators of the whole step, and add its metrics."""
        ...

    def filler(self, batch: TokenBatch) -> Tensor:
        """Compute a scalar that has a gradient path of zero weight, so that the ranks' collectives match."""
        ...

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        """Add the metrics that need all samples of the step; called on the first rank alone."""
        ...


class StepMonitor(Protocol):
    """Reads what the model says of the tokens of one step, and may refuse the step before a weight changes."""

    def restart(self) -> None: ...
    def add(self, samples: Sequence[TrainingSample], batch: TokenBatch, outputs_T: Tensor) -> None: ...
    def judge(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Result of one optimizer step, the same on every rank."""

    gradient_norm: float
    applied: bool
    learning_rate: float
    num_micro_batches: int
    loss_scale: float | None = None
    """Loss scale of float16 training; a refused step has made it smaller. None = no loss scaling."""

    @property
    def sound(self) -> bool:
        """Return whether the step was applied, or refused under a loss scale.

        The scale is smaller then, and ends the run where that does not help.
        """
        return self.applied or self.loss_scale is not None


@dataclass(slots=True)
class _Step:
    """One step as it stays when it is taken again, but for rows that are set aside."""

    samples: Sequence[TrainingSample]
    counts: Counts
    learning_rate: float
    monitor: StepMonitor | None
    mark: Mark


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A step that was refused: its samples, its denominators, and the norm above which a row alone is at fault."""

    samples: Sequence[TrainingSample]
    counts: Counts
    largest_norm: float = math.inf


Trace = Callable[[RefusedStep, MicroBatchLoss, Optimizer, Collectives], Diagnosis]
"""Finds what is at fault for a refused step; every rank calls it, and each gets the same answer."""


_FINE, _NOT_FINITE, _OUT_OF_MEMORY = range(3)


@dataclass(frozen=True, slots=True)
class _Passed:
    """Outcome of all forward and backward passes of a step."""

    state: int
    """Fine, not finite, or out of memory, from the best to the worst: ranks agree on the largest."""
    num_micro_batches: int


class Updater:
    """Optimizer steps of one model on samples.

    A step that runs out of memory is taken again with smaller micro-batches, and one whose gradient is not finite
    or jumps is taken again without the rows at fault (`NumericGuard`); either way the weights change once or not
    at all, on all ranks together.
    """

    def __init__(
        self,
        loss: MicroBatchLoss,
        optimizer: Optimizer,
        collectives: Collectives,
        *,
        micro_batching: MicroBatching,
        learning_rate: Callable[[int], float],
        guard: NumericGuard | None = None,
        trace: Trace | None = None,
        device: str = "cpu",
        pin_memory: bool = False,
        collective_forward: bool = False,
    ) -> None:
        """Store the model's loss, its optimizer and the limits of a micro-batch.

        Args:
            loss: of the model that is trained.
            optimizer: of the model.
            collectives: the ranks that samples are divided among.
            micro_batching: limits of a micro-batch; made smaller for the rest of the run where memory runs out.
            learning_rate: of each update, counted from 0.
            guard: what a step that is refused leads to; None = it is only refused.
            trace: finds what is at fault for a refused step (`FaultTracer`); None = it is skipped.
            device: where the model computes.
            pin_memory: whether batches go to the device from page-locked memory.
            collective_forward: every forward and backward is a collective operation, so all ranks run equally many.
        """
        self._loss = loss
        self._optimizer = optimizer
        self._collectives = collectives
        self._micro_batching = micro_batching
        self._learning_rate = learning_rate
        self._guard = guard or NumericGuard()
        self._trace = trace
        self._device = device
        self._pin_memory = pin_memory
        self._collective_forward = collective_forward

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._loss.model

    @property
    def guard(self) -> NumericGuard:
        """The guard of the steps: what it remembers is part of a checkpoint."""
        return self._guard

    def __call__(
        self,
        samples: Sequence[TrainingSample],
        update_index: int,
        totals: MetricTotals,
        counts: Counts | None = None,
        monitor: StepMonitor | None = None,
    ) -> UpdateOutcome:
        """Take one optimizer step on `samples`, which every rank has in full; each rank trains its share.

        `counts` are the denominators where they differ from the samples' own: samples whose gradient
        is exactly zero may be left out of `samples` while they stay in the denominators. `monitor` sees the
        model's outputs; it may refuse the step, before any weight has changed.

        Raises:
            NumericsError: weights are not finite, or more rows are at fault than may be set aside.
            ServiceError: memory ran out for micro-batches of one unit, or where a forward is collective.
        """
        # over all ranks and micro-batches: each then adds its share of the gradient, and sums need no weights
        counts = counts or count(samples)
        samples, counts = self._guard.without_set_aside(samples, counts)
        step = _Step(samples, counts, self._learning_rate(update_index), monitor, totals.mark())
        outcome = self._attempt(step, totals)
        attempt = 0
        # a refusal under a loss scale is how the scale is found, not a fault
        while not outcome.sound and self._repeats(step, outcome, f"update {update_index + 1}", attempt):
            totals.restore(step.mark)
            outcome, attempt = self._attempt(step, totals), attempt + 1
        if outcome.applied:
            self._guard.applied(outcome.gradient_norm)
        # every rank knows all samples; added on each, they would be summed once a rank
        if self._collectives.rank == 0:
            self._loss.whole_step(step.samples, step.counts, totals)
        return outcome

    def _repeats(self, step: _Step, outcome: UpdateOutcome, where: str, attempt: int) -> bool:
        """Find what is at fault for a refused step; return whether to take it again, without the rows at fault."""
        if self._trace is None or not step.samples:
            return False
        largest = self._guard.largest_norm() if math.isfinite(outcome.gradient_norm) else math.inf
        refused = RefusedStep(step.samples, step.counts, largest)
        diagnosis = self._trace(refused, self._loss, self._optimizer, self._collectives)
        num_units = len(units_of(step.samples))
        again = self._guard.decide(diagnosis, outcome.gradient_norm, num_units=num_units, attempt=attempt, where=where)
        if not again:
            return False
        step.samples, step.counts = self._guard.without_set_aside(step.samples, step.counts)
        return bool(step.samples)

    def _attempt(self, step: _Step, totals: MetricTotals) -> UpdateOutcome:
        """Run all micro-batches and step once; with smaller micro-batches where memory runs out on any rank."""
        while (passed := self._backward_all(step, totals)).state == _OUT_OF_MEMORY:
            self._optimizer.discard()
            totals.restore(step.mark)
            self._halve(step)
        if passed.state == _NOT_FINITE:
            # also where the gradient is finite: a loss that is not has nothing to say about the weights
            self._optimizer.discard()
            return UpdateOutcome(math.nan, False, step.learning_rate, passed.num_micro_batches)
        if step.monitor is not None:
            step.monitor.judge()  # after all backward passes, before any weight changes
        outcome = self._optimizer.step(step.learning_rate, largest_norm=self._guard.largest_norm())
        return UpdateOutcome(
            outcome.gradient_norm,
            outcome.applied,
            step.learning_rate,
            passed.num_micro_batches,
            outcome.loss_scale,
        )

    def _halve(self, step: _Step) -> None:
        """Make micro-batches smaller for the rest of the run; every rank comes to the same limits."""
        smaller = self._micro_batching.halved(step.samples)
        if smaller is None:
            raise no_split_left(self._micro_batching, _longest(step.samples), self._collectives)
        _LOG.warning(
            "out of memory: micro-batches of %s are cut to %s; the step is taken again, its batch and its gradient "
            "stay the same",
            self._micro_batching,
            smaller,
        )
        self._micro_batching = smaller
        self._guard.halved += 1

    def _no_room(self, step: _Step) -> ServiceError:
        limits, longest = self._micro_batching, _longest(step.samples)
        flags = limits.half_as_flags(step.samples)
        if not flags:
            return no_split_left(limits, longest, self._collectives)
        return no_room_in_collective(limits, longest, self._collectives, self._guard.resumed_with(flags))

    def _backward_all(self, step: _Step, totals: MetricTotals) -> _Passed:
        """Accumulate the gradient of this rank's share; what came of it is the same on every rank."""
        ranks, cut = self._collectives, self._micro_batching.cut
        micro_batches = rank_micro_batches(step.samples, ranks.rank, ranks.world_size, cut)
        # behind the micro-batches, whose number differs between ranks: the sum of both is the same on all
        idle = filler_batches(step.samples, ranks, cut, self._device) if self._collective_forward else []
        state = _OUT_OF_MEMORY
        try:
            state = _FINE if self._run(micro_batches, idle, step, totals) else _NOT_FINITE
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._collective_forward:
                # the other ranks wait in this forward or backward, so that no agreement can be reached
                raise self._no_room(step) from error
        # outside the handler: the error holds every tensor of the forward until it is left
        if state == _OUT_OF_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if ranks.world_size > 1:
            # the worst of any rank: they step together, or not at all
            state = int(ranks.max(torch.tensor(state)))
        return _Passed(state, len(micro_batches))

    def _run(
        self,
        micro_batches: Sequence[Sequence[TrainingSample]],
        idle: Sequence[TokenBatch],
        step: _Step,
        totals: MetricTotals,
    ) -> bool:
        """Run forward and backward of every micro-batch; return whether inputs and losses are finite."""
        inputs_finite, losses = True, list[Tensor]()
        if step.monitor is not None:
            step.monitor.restart()
        # fillers count too, since the optimizer needs to know which backward of this rank is its last
        turns = len(micro_batches) + len(idle)
        if self._loss.prepass:
            # statistics of the whole step, so they are taken before the first backward
            self._loss.begin([pack(chosen, self._device) for chosen in micro_batches], idle)
        for number, chosen in enumerate(micro_batches, start=1):
            batch = pack(chosen, self._device, pin_memory=self._pin_memory)
            output = self._loss(batch, step.counts, totals)
            losses.append(output.loss.detach())
            inputs_finite &= not batch.not_finite
            self._optimizer.backward(output.loss, last=number == turns)
            if step.monitor is not None:
                step.monitor.add(chosen, batch, output.outputs_T)
        for number, batch in enumerate(idle, start=1 + len(micro_batches)):
            # times 0 rather than no backward: its collectives run, and every gradient stays as it is
            self._optimizer.backward(self._loss.filler(batch) * 0.0, last=number == turns)
        # read once, behind the last backward: a number here earlier would wait for the device at every micro-batch
        return inputs_finite and (not losses or bool(torch.stack(losses).isfinite().all()))


def _longest(samples: Sequence[TrainingSample]) -> int:
    return max(sample.num_tokens for sample in samples)


def scale_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Return the loss scale of the last step and the number of skipped steps, by metric name; empty without scaling."""
    if not outcomes or outcomes[-1].loss_scale is None:
        return {}
    skipped = sum(not outcome.applied for outcome in outcomes)
    return {f"{part}/loss_scale": outcomes[-1].loss_scale, f"{part}/updates_skipped": skipped}


def update_metrics(part: str, outcomes: Sequence[UpdateOutcome]) -> Mapping[str, object]:
    """Summarize the optimizer steps that one training step took on a model, as metrics by name."""
    # refused steps have norms that are not finite, which would take the mean with them
    applied = [outcome for outcome in outcomes if outcome.applied]
    norms = [outcome.gradient_norm for outcome in applied]
    return {
        **scale_metrics(part, outcomes),
        f"{part}/gradient_norm": sum(norms) / len(norms) if norms else math.nan,
        f"{part}/learning_rate": outcomes[-1].learning_rate if outcomes else math.nan,
        f"{part}/updates": len(applied),
        f"{part}/updates_refused": len(outcomes) - len(applied),
        f"{part}/micro_batches": sum(outcome.num_micro_batches for outcome in outcomes),
    }
