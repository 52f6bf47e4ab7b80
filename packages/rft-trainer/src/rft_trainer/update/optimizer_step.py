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

from rft_core.errors import OptionsError, ServiceError
from rft_trainer.batches.memory_use import MemoryUse, memory_use
from rft_trainer.batches.out_of_memory import is_out_of_memory, longest_sample, no_room_in_collective, no_split_left
from rft_trainer.batches.packing import count, filler_batches, pack, rank_micro_batches
from rft_trainer.batches.units import MicroBatching, units_of
from rft_trainer.metrics.compute_meter import ComputeMeter
from rft_trainer.metrics.totals import Mark, MetricTotals
from rft_trainer.metrics.weight_change import ReplicatedWeights, WeightSample
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
    """Outcome of all forward and backward passes of a batch."""

    state: int
    """Fine, not finite, or out of memory, from the best to the worst: ranks agree on the largest."""
    num_micro_batches: int


@dataclass(slots=True)
class _Batch:
    """Samples whose gradient is in the next step, as they stay when it is taken again, but for rows set aside."""

    samples: Sequence[TrainingSample]
    counts: Counts
    loss: MicroBatchLoss
    monitor: StepMonitor | None
    totals: MetricTotals
    mark: Mark
    passed: _Passed = _Passed(_FINE, 0)


class Updater:
    """Optimizer steps of one model on samples: `forward_backward` on one batch or several, then `step`.

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
        meter: ComputeMeter | None = None,
        sample: WeightSample | None = None,
    ) -> None:
        """Store the model's loss, its optimizer and the limits of a micro-batch.

        Args:
            loss: of the model that is trained.
            optimizer: of the model.
            collectives: the ranks that samples are divided among.
            micro_batching: limits of a micro-batch; made smaller for the rest of the run where memory runs out.
            learning_rate: of each update, counted from 0; asked before the first forward of the update.
            guard: what a step that is refused leads to; None = it is only refused.
            trace: finds what is at fault for a refused step (`FaultTracer`); None = it is skipped.
            device: where the model computes.
            pin_memory: whether batches go to the device from page-locked memory.
            collective_forward: every forward and backward is a collective operation, so all ranks run equally many.
            meter: counts the arithmetic of the samples.
            sample: of the weights, by which the size of an update is measured; None = every rank has all.
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
        self._meter = meter
        self._sample = WeightSample(ReplicatedWeights(loss.model)) if sample is None else sample
        self._batches: list[_Batch] = []
        self._update_index, self._rate = 0, math.nan
        self._under_way: Sequence[TrainingSample] = ()
        self._interrupted = False
        self._memory: MemoryUse | None = None
        """What held the memory of this rank where it last ran out; None where it was another rank's."""

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._loss.model

    @property
    def loss(self) -> MicroBatchLoss:
        """The loss of batches that come without one of their own."""
        return self._loss

    @property
    def guard(self) -> NumericGuard:
        """The guard of the steps: what it remembers is part of a checkpoint."""
        return self._guard

    @property
    def num_batches(self) -> int:
        """Batches whose gradients wait for `step`."""
        return 0 if self._interrupted else len(self._batches)

    def __call__(
        self,
        samples: Sequence[TrainingSample],
        update_index: int,
        totals: MetricTotals,
        counts: Counts | None = None,
        monitor: StepMonitor | None = None,
    ) -> UpdateOutcome:
        """Take one optimizer step on `samples`: `forward_backward` and `step` in one."""
        self.forward_backward(samples, update_index, totals, counts, monitor)
        return self.step()

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        update_index: int,
        totals: MetricTotals,
        counts: Counts | None = None,
        monitor: StepMonitor | None = None,
        *,
        loss: MicroBatchLoss | None = None,
    ) -> None:
        """Add the gradient of the loss on `samples` to that of the next step.

        Every rank has the samples in full and trains its share of them.

        Args:
            samples: whole units.
            update_index: number of the update that `step` will make, from 0; counts at the first batch of a step.
            totals: takes the metrics of the batch.
            counts: the denominators where they differ from the samples' own: samples whose gradient is exactly zero
                may be left out of `samples` while they stay in the denominators.
            monitor: sees the model's outputs; it may refuse the step, before any weight has changed.
            loss: of this batch; None = the model's own.

        Raises:
            ServiceError: memory ran out for micro-batches of one unit, or where a forward is collective.
        """
        if self._interrupted:
            self.discard()
        if not self._batches:
            self._update_index, self._rate = update_index, self._learning_rate(update_index)
        # over all ranks and micro-batches: each then adds its share of the gradient, and sums need no weights
        samples, counts = self._guard.without_set_aside(samples, counts or count(samples))
        if self._meter is not None:
            self._meter.add(sample.num_tokens for sample in samples)
        self._batches.append(_Batch(samples, counts, loss or self._loss, monitor, totals, totals.mark()))
        # an error in the middle leaves a gradient of half a batch, which no step may use
        self._interrupted = True
        self._accumulate(self._batches[-1:])
        self._interrupted = False

    def step(self) -> UpdateOutcome:
        """Change the weights once by the gradients of all batches since the last step, or not at all.

        Raises:
            OptionsError: there was no batch since the last step.
            NumericsError: weights are not finite, or more rows are at fault than may be set aside.
            ServiceError: as of `forward_backward`, where the step is taken again.
        """
        if not self.num_batches:
            raise _nothing_to_step()
        # where an error ends it the gradients are dropped before the next batch
        self._interrupted = True
        self._sample.begin()
        outcome = self._apply()
        attempt = 0
        # a refusal under a loss scale is how the scale is found, not a fault
        while not outcome.sound and self._repeats(outcome, attempt):
            self._restore_totals()
            self._accumulate(self._batches)
            outcome, attempt = self._apply(), attempt + 1
        if outcome.applied:
            self._batches[0].totals.add_change(f"{self._guard.part}/weight_change", self._sample.change())
            # not under a loss scale, which counts the steps that a search takes
            jumped = outcome.loss_scale is None and outcome.gradient_norm > self._guard.watched_norm()
            self._guard.applied(outcome.gradient_norm)
            for batch in self._batches:
                # of losses that have something to do once the weights have changed, such as that of routers
                getattr(batch.loss, "after_step", _nothing)(batch.totals)
            if jumped and self._trace is not None:
                self._name_rows(self._trace, outcome.gradient_norm)
        # every rank knows all samples; added on each, they would be summed once a rank
        if self._collectives.rank == 0:
            for batch in self._batches:
                batch.loss.whole_step(batch.samples, batch.counts, batch.totals)
        self._batches.clear()
        self._interrupted = False
        return outcome

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a training step, those of all ranks: they decide how closely the next is looked at."""
        self._sample.see(metrics.get(f"{self._guard.part}/weight_change"))

    def discard(self) -> None:
        """Drop the gradients of all batches since the last step, as if there had been none; every rank calls it."""
        self._optimizer.discard()
        self._batches.clear()
        self._interrupted = False

    def _repeats(self, outcome: UpdateOutcome, attempt: int) -> bool:
        """Find what is at fault for a refused step; return whether to take it again, without the rows at fault."""
        if self._trace is None or not any(batch.samples for batch in self._batches):
            return False
        largest = self._guard.largest_norm() if math.isfinite(outcome.gradient_norm) else math.inf
        diagnosis = self._diagnose(self._trace, largest)
        num_units = sum(len(units_of(batch.samples)) for batch in self._batches)
        where = f"update {self._update_index + 1}"
        again = self._guard.decide(diagnosis, outcome.gradient_norm, num_units=num_units, attempt=attempt, where=where)
        if not again:
            return False
        for batch in self._batches:
            batch.samples, batch.counts = self._guard.without_set_aside(batch.samples, batch.counts)
        return any(batch.samples for batch in self._batches)

    def _name_rows(self, trace: Trace, norm: float) -> None:
        """Tell the rows with the largest gradients of a step that was applied although its norm jumped.

        With the weights after the step, which clips such a gradient: the search changes nothing that is trained.
        """
        device = torch.device(self._device)
        # dropout draws in the search, too, and the run must go on as if there had been none
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            diagnosis = self._diagnose(trace, self._guard.watched_norm())
        self._guard.name_rows(diagnosis, norm, where=f"update {self._update_index + 1}")

    def _diagnose(self, trace: Trace, largest: float) -> Diagnosis:
        """Trace every batch of the step; weights that are not finite say all there is to say.

        `largest` is the norm above which a row alone is at fault; infinity where norms do not matter.
        """
        found: list[Diagnosis] = []
        for batch in self._batches:
            if batch.samples:
                refused = RefusedStep(batch.samples, batch.counts, largest)
                found.append(trace(refused, batch.loss, self._optimizer, self._collectives))
                if found[-1].weights:
                    return found[-1]
        return Diagnosis.joined(found)

    def _accumulate(self, batches: Sequence[_Batch]) -> None:
        """Run these batches; where memory runs out on any rank, all of the step in smaller micro-batches."""
        waiting = list(batches)
        while waiting:
            batch = waiting.pop(0)
            batch.passed = self._backward_all(batch)
            if batch.passed.state == _OUT_OF_MEMORY:
                self._optimizer.discard()
                self._restore_totals()
                self._halve(batch)
                waiting = list(self._batches)

    def _restore_totals(self) -> None:
        """Forget the metrics of all batches of the step, which are computed again."""
        # the last first: where batches share their totals, the mark of the first is the one that stays
        for batch in reversed(self._batches):
            batch.totals.restore(batch.mark)

    def _apply(self) -> UpdateOutcome:
        """Step once by what is accumulated."""
        num_micro_batches = sum(batch.passed.num_micro_batches for batch in self._batches)
        if any(batch.passed.state == _NOT_FINITE for batch in self._batches):
            # also where the gradient is finite: a loss that is not has nothing to say about the weights
            self._optimizer.discard()
            return UpdateOutcome(math.nan, False, self._rate, num_micro_batches)
        for batch in self._batches:
            if batch.monitor is not None:
                batch.monitor.judge()  # after all backward passes, before any weight changes
        outcome = self._optimizer.step(self._rate, largest_norm=self._guard.largest_norm())
        return UpdateOutcome(
            outcome.gradient_norm,
            outcome.applied,
            self._rate,
            num_micro_batches,
            outcome.loss_scale,
        )

    def _halve(self, batch: _Batch) -> None:
        """Make micro-batches smaller for the rest of the run; every rank comes to the same limits."""
        smaller = self._micro_batching.halved(batch.samples)
        if smaller is None:
            longest = longest_sample(self._under_way or batch.samples)
            raise no_split_left(self._micro_batching, longest, self._collectives, self._memory)
        _LOG.warning(
            "out of memory%s: micro-batches of %s are cut to %s; the step is taken again, its batch and its gradient "
            "stay the same",
            f" ({self._memory})" if self._memory else " on another rank",
            self._micro_batching,
            smaller,
        )
        self._micro_batching = smaller
        self._guard.halved += 1

    def _no_room(self, batch: _Batch, use: MemoryUse) -> ServiceError:
        limits, longest = self._micro_batching, longest_sample(self._under_way or batch.samples)
        flags = limits.half_as_flags(batch.samples)
        if not flags:
            return no_split_left(limits, longest, self._collectives, use)
        return no_room_in_collective(limits, longest, self._collectives, use, self._guard.resumed_with(flags))

    def _backward_all(self, batch: _Batch) -> _Passed:
        """Accumulate the gradient of this rank's share; what came of it is the same on every rank."""
        ranks, cut = self._collectives, self._micro_batching.cut
        micro_batches = rank_micro_batches(batch.samples, ranks.rank, ranks.world_size, cut)
        # behind the micro-batches, whose number differs between ranks: the sum of both is the same on all
        idle = filler_batches(batch.samples, ranks, cut, self._device) if self._collective_forward else []
        state, self._memory = _OUT_OF_MEMORY, None
        try:
            state = _FINE if self._run(micro_batches, idle, batch) else _NOT_FINITE
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # now: the error still holds what the forward made
            self._memory = self._guard.memory_ran_out(memory_use(error, self._optimizer, self._device))
            if self._collective_forward:
                # the other ranks wait in this forward or backward, so that no agreement can be reached
                raise self._no_room(batch, self._memory) from error
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
        of: _Batch,
    ) -> bool:
        """Run forward and backward of every micro-batch; return whether inputs and losses are finite."""
        inputs_finite, losses = True, list[Tensor]()
        self._under_way = ()
        if of.monitor is not None:
            of.monitor.restart()
        # fillers count too, since the optimizer needs to know which backward of this rank is its last
        turns = len(micro_batches) + len(idle)
        if of.loss.prepass:
            # statistics of the whole batch, so they are taken before the first backward
            of.loss.begin([pack(chosen, self._device) for chosen in micro_batches], idle)
        for number, chosen in enumerate(micro_batches, start=1):
            self._under_way = chosen
            batch = pack(chosen, self._device, pin_memory=self._pin_memory)
            output = of.loss(batch, of.counts, of.totals)
            losses.append(output.loss.detach())
            inputs_finite &= not batch.not_finite
            self._optimizer.backward(output.loss, last=number == turns)
            if of.monitor is not None:
                of.monitor.add(chosen, batch, output.outputs_T)
        self._under_way = ()
        for number, batch in enumerate(idle, start=1 + len(micro_batches)):
            # times 0 rather than no backward: its collectives run, and every gradient stays as it is
            self._optimizer.backward(of.loss.filler(batch) * 0.0, last=number == turns)
        # read once, behind the last backward: a number here earlier would wait for the device at every micro-batch
        return inputs_finite and (not losses or bool(torch.stack(losses).isfinite().all()))


def _nothing(_: MetricTotals) -> None:
    """Do nothing behind a step."""


def _nothing_to_step() -> OptionsError:
    return OptionsError(
        code="update.no_gradient",
        what="step() was called, and no batch has gone forward and backward since the last step",
        where="trainer.step()",
        why="a step applies the gradients that forward_backward has added up",
        state="no weight was changed",
        do="trainer.forward_backward(batch, loss)",
    )
