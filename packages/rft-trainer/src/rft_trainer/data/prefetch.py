"""Prefetching of prompt batches by threads, with the order and the content of inline preparation."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from types import TracebackType
from typing import Generic, TypeVar

from rft_core.errors import OptionsError

Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")

AUTOMATIC = -1
"""Number of threads that is chosen from the times of the first batches."""
_LOG = logging.getLogger(__name__)
_FIRST = 3
"""First batches that are not measured: they meet cold caches, and steps that compile."""
_MEASURED = 8
_WAITS = 0.10
"""Share of the time from which on threads are started: the one from which a run counts as bound by its data."""
_LEAST_SECONDS = 0.002
"""Time of a batch below which threads would save nothing that is seen."""
_MOST_THREADS = 8


class Prefetcher(Generic[Batch, Prepared]):
    """Iterator of `prepare(batch)` over `batches`, up to num_workers x prefetch_factor batches ahead.

    `batches` is advanced in the consumer's thread only, so it may be a generator that reserves
    prompts in a ledger; `prepare` runs in the threads and must not depend on the order of calls.
    An error of `prepare` is raised where its batch would have come, after all earlier batches; one
    of `batches` at once.
    With `num_workers` 0 everything happens inline, when a batch is asked for. With `AUTOMATIC` it does so until the
    last few batches show that the consumer waits for them; then as many threads begin as keep up with it.

    Example::

        with Prefetcher(batches, prepare, num_workers=2, prefetch_factor=2) as prepared:
            for prompts in prepared: ...
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        prepare: Callable[[Batch], Prepared],
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check("num_workers", num_workers, AUTOMATIC)
        _check("prefetch_factor", prefetch_factor, 1)
        self._batches = iter(batches)
        self._prepare = prepare
        self._prefetch_factor = prefetch_factor
        self._max_pending = 0
        self._pending: deque[Future[Prepared]] = deque()
        self._exhausted = False
        self._pool: ThreadPoolExecutor | None = None
        self._waits = _Waits(clock) if num_workers == AUTOMATIC else None
        if num_workers > 0:
            self._start(num_workers)

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if self._pool is None:
            if self._exhausted:
                raise StopIteration
            if self._waits is None:
                return self._prepare(next(self._batches))
            with self._waits:
                prepared = self._prepare(next(self._batches))
            num_threads = self._waits.num_threads()
            if num_threads:
                self._start(num_threads)
            return prepared
        # in the consumer's thread, because taking a batch may reserve prompts in the ledger
        self._fill(self._pool)
        if not self._pending:
            raise StopIteration
        # the oldest one, ready or not: the order must not depend on which thread is faster
        return self._pending.popleft().result()

    def close(self) -> None:
        """Drop the prefetched batches and wait for the threads; safe to call twice."""
        self._exhausted = True
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher[Batch, Prepared]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, num_threads: int) -> None:
        self._max_pending = num_threads * self._prefetch_factor
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while not self._exhausted and len(self._pending) < self._max_pending:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._exhausted = True
            else:
                self._pending.append(pool.submit(self._prepare, batch))


class _Waits:
    """Times of the last batches: how long one took to prepare, and how long the consumer was away before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_batches = 0
        self._begun = self._ended = 0.0
        self._prepared: deque[float] = deque(maxlen=_MEASURED)
        self._away: deque[float] = deque(maxlen=_MEASURED)

    def __enter__(self) -> None:
        self._begun = self._clock()

    def __exit__(self, *_: object) -> None:
        ended = self._clock()
        self._num_batches += 1
        if self._num_batches > _FIRST:
            self._prepared.append(ended - self._begun)
            self._away.append(self._begun - self._ended)
        self._ended = ended

    def num_threads(self) -> int:
        """Return how many threads keep up with the consumer; 0 while it hardly waits, or too little is known."""
        if len(self._prepared) < _MEASURED:
            return 0
        # medians: an evaluation or a checkpoint between two batches says nothing of the others
        seconds, away = median(self._prepared), median(self._away)
        if seconds < _LEAST_SECONDS or seconds <= _WAITS * (seconds + away):
            return 0
        most = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        num_threads = min(math.ceil(seconds / away), most) if away > 0 else most
        _LOG.info(
            "preparing a batch took %.3g s, and using it %.3g s: %d threads prepare batches from here on",
            seconds,
            away,
            num_threads,
        )
        return num_threads


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionsError(
            code=f"data.{name}",
            what=f"{name} = {value}; at least {least} is needed",
            where=f"--{name}",
            why="it is a number of threads or of batches"
            + ("; 0 means none, and -1 as many as the times of the first batches ask for" if least < 0 else ""),
            do=f"--{name} {least}",
        )
