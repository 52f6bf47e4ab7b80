"""What more replicas would give: a simulation of replicas and trainer from measured times.

Every replica draws its own samples of a step; a decode step of B rows takes `fixed + each * B` seconds, whatever a row
holds. The trainer takes `train` seconds a step: it is thought to grow with the number of replicas. Step n may be
drawn from version n - K on; on a new version a replica computes its running prefixes again (`prefill` seconds a
token). Weights travel in no time.
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
        self._ends: list[tuple[float, float, int]] = []

    def add(self, now: float, rows: list[tuple[int, int]]) -> None:
        """(tokens, step) of new samples at an update, after which the running ones are read again."""
        self.advance(now)
        read = sum(self._done - begun for _, begun, _ in self._ends)
        self._pause += self._times.prefill * read
        for tokens, step in rows:
            heapq.heappush(self._ends, (self._done + tokens, self._done, step))

    @property
    def _seconds_a_token(self) -> float:
        return self._times.fixed + self._times.each * len(self._ends)

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


def simulate(
    times: Times, num_replicas: int, samples_a_replica: int, staleness: int, num_steps: int, length: Callable[[int], int]
) -> float:
    """Samples a second of all replicas together; `length(i)` is that of the i-th sample."""
    replicas = [_Replica(times) for _ in range(num_replicas)]
    missing = {step: num_replicas * samples_a_replica for step in range(num_steps)}
    drawn, submitted, step, now, trained_at = 0, 0, 0, 0.0, float("inf")

    def submit(limit: int) -> None:
        nonlocal drawn, submitted
        rows: list[list[tuple[int, int]]] = [[] for _ in replicas]
        while submitted <= min(limit, num_steps - 1):
            for row in rows:
                row += [(length(drawn + i), submitted) for i in range(samples_a_replica)]
                drawn += samples_a_replica
            submitted += 1
        for replica, row in zip(replicas, rows, strict=True):
            replica.add(now, row)

    submit(staleness)
    while step < num_steps:
        if not missing[step] and trained_at == float("inf"):
            trained_at = now + times.train
        now = min(trained_at, min(replica.next_end() for replica in replicas))
        for replica in replicas:
            if replica.next_end() <= now + 1e-12:
                for ended in replica.advance(now):
                    missing[ended] -= 1
        if now >= trained_at:
            for replica in replicas:
                for ended in replica.advance(now):
                    missing[ended] -= 1
            step, trained_at = step + 1, float("inf")
            submit(step + staleness)
    return num_steps * num_replicas * samples_a_replica / now
