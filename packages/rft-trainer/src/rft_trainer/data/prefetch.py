"""Prefetching of prompt batches by threads, with the order and the content of inline preparation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from rft_core.errors import OptionsError

Batch = TypeVar("Batch")
Prepared = TypeVar("Prepared")


class Prefetcher(Generic[Batch, Prepared]):
    """Iterator of `prepare(batch)` over `batches`, up to num_workers x prefetch_factor batches ahead.

    `batches` is advanced in the consumer's thread only, so it may be a generator that reserves
    prompts in a ledger; `prepare` runs in the threads and must not depend on the order of calls.
    An error of `prepare` is raised where its batch would have come, after all earlier batches; one
    of `batches` at once.
    With `num_workers` 0 everything happens inline, when a batch is asked for.

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
    ) -> None:
        _check("num_workers", num_workers, 0)
        _check("prefetch_factor", prefetch_factor, 1)
        self._batches = iter(batches)
        self._prepare = prepare
        self._max_pending = num_workers * prefetch_factor
        self._pending: deque[Future[Prepared]] = deque()
        self._exhausted = False
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prepare") if num_workers else None

    def __iter__(self) -> Iterator[Prepared]:
        return self

    def __next__(self) -> Prepared:
        if self._pool is None:
            if self._exhausted:
                raise StopIteration
            return self._prepare(next(self._batches))
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

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while not self._exhausted and len(self._pending) < self._max_pending:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._exhausted = True
            else:
                self._pending.append(pool.submit(self._prepare, batch))


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise OptionsError(
            code=f"data.{name}",
            what=f"{name} = {value}; at least {least} is needed",
            where=f"--{name}",
            why="it is a number of threads or of batches" + ("; 0 means none" if least == 0 else ""),
            do=f"--{name} {least}",
        )
