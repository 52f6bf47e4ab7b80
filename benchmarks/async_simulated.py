"""What more replicas would give: a simulation of replicas and trainer from measured times.

Every replica draws its own samples of a step; a decode step of B rows takes `fixed + each * B` seconds, whatever a row
holds. The trainer takes `train` seconds a step: it is thought to grow with the number of replicas. Step n may be
drawn from version n - K on; on a new version a replica computes its running prefixes again (`prefill` seconds a
token). Weights travel in no time. Where trainer and replicas share cores, replicas are slower while it trains.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Measured, in seconds."""

    fixed: float
    each: float
    prefill: float
    train: float


class _Replica:
    """Rows that are decoded together: `done` tokens a row since the start, and where each row ends."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._done, self._at, self._pause = 0.0, 0.0, 0.0
        self.speed = 1.0
        """Share of its core that it gets; changed after `advance` to that instant."""
        self._ends: list[tuple[float, float, int]] = []

    def add(self, now: float, rows: list[tuple[int, int]]) -> list[int]:
        """(tokens, step) of new samples at an update, after which the running ones are read again; as `advance`."""
        ended = self.advance(now)
        read = sum(self._done - begun for _, begun, _ in self._ends)
        self._pause += self._times.prefill * read
        for tokens, step in rows:
            heapq.heappush(self._ends, (self._done + tokens, self._done, step))
        return ended

    @property
    def _seconds_a_token(self) -> float:
        return (self._times.fixed + self._times.each * len(self._ends)) / self.speed

    def next_end(self) -> float:
        """When its next sample ends."""
        if not self._ends:
            return float("inf")
        return self._at + self._pause + (self._ends[0][0] - self._done) * self._seconds_a_token

    def advance(self, now: float) -> list[int]:
        """Steps of the samples that have ended by `now`."""
        ended: list[int] = []
        while self.next_end() <= now + 1e-12:
            self._at, self._pause = self.next_end(), 0.0
            end, _, step = heapq.heappop(self._ends)
            self._done = end
            ended.append(step)
        if self._ends:
            spent = now - self._at
            paused = min(self._pause, spent)
            self._pause -= paused
            self._done += (spent - paused) / self._seconds_a_token
        self._at = now
        return ended


Length = Callable[[int], int]
"""Tokens of the i-th sample."""


class _Simulation:
    """Replicas and one trainer, from event to event."""

    def __init__(
        self,
        times: Times,
        num_replicas: int,
        samples: int,
        staleness: int,
        num_steps: int,
        length: Callable[[int], int],
        speed: float,
    ) -> None:
        self._times, self._samples, self._staleness, self._num_steps = times, samples, staleness, num_steps
        self._length, self._speed = length, speed
        self._replicas = [_Replica(times) for _ in range(num_replicas)]
        self._missing = {step: num_replicas * samples for step in range(num_steps)}
        self._drawn = self._submitted = 0

    def seconds(self) -> float:
        """Until every step is trained."""
        step, now, trained_at = 0, 0.0, float("inf")
        self._submit(self._staleness, now)
        while step < self._num_steps:
            if not self._missing[step] and trained_at == float("inf"):
                trained_at = now + self._times.train
                self._run_at(self._speed, now)
            now = min(trained_at, min(replica.next_end() for replica in self._replicas))
            for replica in self._replicas:
                if now >= trained_at or replica.next_end() <= now + 1e-12:
                    for ended in replica.advance(now):
                        self._missing[ended] -= 1
            if now >= trained_at:
                step, trained_at = step + 1, float("inf")
                self._run_at(1.0, now)
                self._submit(step + self._staleness, now)
        return now

    def _run_at(self, speed: float, now: float) -> None:
        for replica in self._replicas:
            for ended in replica.advance(now):
                self._missing[ended] -= 1
            replica.speed = speed

    def _submit(self, last: int, now: float) -> None:
        """Samples of the steps up to `last`, with an update of the weights."""
        rows: list[list[tuple[int, int]]] = [[] for _ in self._replicas]
        while self._submitted <= min(last, self._num_steps - 1):
            for row in rows:
                row += [(self._length(self._drawn + i), self._submitted) for i in range(self._samples)]
                self._drawn += self._samples
            self._submitted += 1
        for replica, row in zip(self._replicas, rows, strict=True):
            for ended in replica.add(now, row):
                self._missing[ended] -= 1


def simulate(
    times: Times,
    num_replicas: int,
    samples: int,
    staleness: int,
    num_steps: int,
    length: Length,
    speed: float = 1.0,
) -> float:
    """Samples a second of all replicas together.

    Args:
        times: measured.
        num_replicas, samples: engines, and samples of a step for each.
        staleness: K.
        num_steps: training steps.
        length: tokens of the i-th sample.
        speed: share of its core that a replica gets while the trainer trains.
    """
    simulation = _Simulation(times, num_replicas, samples, staleness, num_steps, length, speed)
    return num_steps * num_replicas * samples / simulation.seconds()
