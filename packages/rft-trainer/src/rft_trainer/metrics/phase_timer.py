"""Timer of the phases of a step: seconds and shares by phase, rates of samples and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it brings torch, which the pages of a run do without
    from rft_trainer.metrics.compute_meter import ComputeMeter

ANNOTATION = "phase "
"""What the name of a phase begins with in a trace of torch's profiler."""


class Phase(StrEnum):
    """The parts of a step; what falls outside all of them is "other"."""

    DATA = "data"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TOOLS = "tools"
    LOGPROB = "logprob"
    TRAIN = "train"
    SYNC = "sync"
    EVAL = "eval"
    SAVE = "save"


class PhaseListener(Protocol):
    """Listener that is notified of the phases of a rank."""

    def enter_phase(self, name: str | None) -> None:
        """Record the phase from now on; None: between phases."""
        ...

    def end_step(self) -> None:
        """Record the end of a step."""
        ...


class PhaseTimer:
    """Timer that attributes every second to one phase.

    A phase inside another takes its seconds from the outer one, so the phases and "other" sum to
    the step. `synchronize` is called at both ends of a phase (a device that runs ahead of the
    host would otherwise charge its work to a later phase); `clock` gives seconds. `listener` is notified
    of every phase when it begins and ends; `meter` gives the rates of arithmetic. `waited` gives the seconds that this
    rank has spent so far in exchanges with other ranks.

    Example::

        timer = PhaseTimer()
        with timer.phase(Phase.ROLLOUT):
            ...
        metrics = timer.step(num_samples=512, num_tokens=81_920)
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        listener: PhaseListener | None = None,
        meter: ComputeMeter | None = None,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._waited = waited or (lambda: 0.0)
        self._meter = meter
        self._listener = listener
        self._clock = clock
        self._synchronize = synchronize or (lambda: None)
        self._stack: list[Phase] = []
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._started = self._marked = clock()
        self._worked_from = (self._started, self._waited())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Charge the time of the block to `phase`, also when it raises."""
        # here, because the pages of a run use the names of the phases and do without torch
        from torch.profiler import record_function

        # work that a device still does belongs to what came before
        self._synchronize()
        self._charge()
        self._stack.append(phase)
        self._tell()
        try:
            # in a trace of torch's profiler, of whoever made it, the phase is a span of its own
            with record_function(f"{ANNOTATION}{phase}"):
                yield
                # not in `finally`: after an error a device may not answer any more
                self._synchronize()
        finally:
            self._charge()
            self._stack.pop()
            self._tell()

    def worked(self) -> float:
        """Return the seconds since the last call, or since the start, without those of exchanges with other ranks."""
        start, waited = self._worked_from
        self._worked_from = now, waited_now = self._clock(), self._waited()
        return max(0.0, (now - start) - (waited_now - waited))

    def step(self, *, num_samples: int, num_tokens: int) -> dict[str, float]:
        """Return the metrics of the step that ends now, and start the next.

        time/step and time/<phase> in seconds, time/share_<phase> of the step,
        time/samples_per_minute and time/tokens_per_second. Rates and shares are left
        out of a step that took no measurable time.
        """
        if self._stack:
            raise ValueError(f"a step ends outside of every phase, not inside {self._stack[-1]}")
        now = self._clock()
        total = now - self._started
        seconds: dict[str, float] = {str(phase): spent for phase, spent in self._seconds.items()}
        # rounding may leave a sum slightly above the total
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        metrics = {"time/step": total, **{f"time/{name}": spent for name, spent in seconds.items()}}
        if total > 0:
            metrics |= {f"time/share_{name}": spent / total for name, spent in seconds.items()}
            metrics["time/samples_per_minute"] = 60.0 * num_samples / total
            metrics["time/tokens_per_second"] = num_tokens / total
        if self._meter is not None:
            metrics |= self._meter.take(metrics)
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._started = self._marked = now
        if self._listener is not None:
            self._listener.end_step()
        return metrics

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener.enter_phase(self._stack[-1] if self._stack else None)

    def _charge(self) -> None:
        now = self._clock()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._marked
        self._marked = now
