"""One call over several replicas: shares are drawn in parallel, those of a dead replica by another.

```
   caller's thread                        one thread a replica
   ---------------                        --------------------
   deal, start threads  ───────────────►  load(weights) if it holds others; draw(share) over its pipe
   take results from the inbox  ◄───────  each result as it comes (inbox)
   ask stop() every 5 ms                  share done: wait until all is done, or something is left over
     true: interrupt every replica ─────► (shared flag) the call ends between two steps, with what it has
   until every request has a result       replica dead: its unfinished requests are left over (wakes the others);
                                          `health` starts it again; once it is ready, wait as the others do
```

A result is the same whichever replica draws it: it follows from the key. A request whose replica ended is
given to another one twice, then the run ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from rft_core.errors import RftError, ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.process.requests import garbage
from rft_engine.replicas.health import ReplicaHealth
from rft_engine.replicas.load_balancing import assign_samples
from rft_engine.replicas.process import is_lost
from rft_engine.weight_sync.shared_memory import WeightSnapshot

_POLL_SECONDS = 0.005
_WAIT_SECONDS = 0.5
_MOST_LOSSES = 2


class Replica(Protocol):
    """One of several engines with the same weights."""

    number: int
    can_resume: bool
    """Whether a call can be interrupted, and samples that were begun can be drawn on."""
    reads_files: bool
    """Whether images reach it through files."""

    @property
    def facts(self) -> EngineFacts: ...

    def load(self, snapshot: WeightSnapshot) -> None: ...

    def draw(self, call: SampleRequests) -> Iterator[SampledTokens]: ...

    def interrupt(self) -> None: ...

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ReplicaDispatch:
    """One call over all replicas, from the assignment of samples to the last result."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        health: ReplicaHealth,
        call: SampleRequests,
        weights: WeightSnapshot,
        stop: Callable[[], bool] | None,
    ) -> None:
        """Begin a call; `weights` are loaded first into a replica that holds others, as `health` knows."""
        self.health, self._versions = health, health.versions
        self._replicas, self._call, self._weights, self._stop = replicas, call, weights, stop
        self._changed = threading.Condition()
        self._left_over: list[int] = []
        self._open = set(range(len(call.prefixes)))
        self._losses = Counter[int]()
        self._ending = False
        self._inbox: queue.SimpleQueue[SampledTokens | BaseException] = queue.SimpleQueue()
        self.busy_seconds = [0.0] * len(replicas)
        self.num_reissued = 0

    def results(self) -> Iterator[SampledTokens]:
        """Yield every request's result as it comes; after `stop()` those that are left have the reason "interrupted".

        Raises:
            RftError: of a replica, where it is not simply gone; all are gone for good.
        """
        waiting = len(self._call.prefixes)
        if waiting:
            self.health.require_one()
        # those that start again come later, for what is left over then
        ready = self.health.ready
        shares = dict(zip(ready, assign_samples(self._call, len(ready)), strict=True)) if ready else {}
        threads = [
            # a thread each, because a replica's results are read from its pipe with blocking waits
            threading.Thread(target=self._serve, args=(i, shares.get(i, [])), name=f"replica-{i}", daemon=True)
            for i in self.health.remaining
        ]
        for thread in threads:
            thread.start()
        try:
            while waiting:
                self._interrupt_where_asked()
                try:
                    item = self._inbox.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(item, BaseException):
                    raise item
                waiting -= 1
                yield item
        finally:
            # also where the caller stops iterating: no replica may draw on into the next call
            self._end()
            for thread in threads:
                # bounded: every call to a replica has a deadline, and has been interrupted; restarts are not waited for
                thread.join()

    def _interrupt_where_asked(self) -> None:
        """Interrupt all replicas once `stop()` is true, and at every later poll: a call may begin between two polls."""
        if self._stop is not None and not self._ending and self._stop():
            with self._changed:
                self._ending = True
                unassigned, self._left_over = self._left_over, []
                self._open.difference_update(unassigned)
                self._changed.notify_all()
            self.health.tell()
            # nobody draws these any more, and the caller waits for a result of each
            for request in unassigned:
                self._inbox.put(SampledTokens(request, (), (), (), "interrupted", self._weights.version))
        if self._ending:
            for index in self.health.ready:
                self._replicas[index].interrupt()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self.health.tell()
        for index in self.health.ready:
            self._replicas[index].interrupt()

    def _serve(self, index: int, share: list[int]) -> None:
        """Run a replica's thread: draw its share, then requests of lost replicas, until all is done."""
        try:
            while self.health.wait(index, self._is_over) and (share or (share := self._next_share())):
                started = time.monotonic()
                lost = self._draw(index, share)
                self.busy_seconds[index] += time.monotonic() - started
                if lost is not None:
                    # before the restart, which takes long: the others draw them meanwhile
                    self._give_away(share, lost)
                    self.health.lost(index, lost)
                else:
                    self.health.worked(index)
                share = []
            self._require_a_replica()
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            self._inbox.put(error)

    def _draw(self, index: int, share: Sequence[int]) -> RftError | None:
        """Put the results of a share into the inbox; return the error of a replica that is gone, else None."""
        with self._changed:
            share = [request for request in share if request in self._open]
        try:
            self._load(index)
            for drawn in self._replicas[index].draw(self._call.part(share)):
                request = share[drawn.request]
                with self._changed:
                    # before the inbox has it: a death from here on must not have it drawn again
                    self._open.discard(request)
                    # wakes the replicas that wait for left-over requests
                    if not self._open:
                        self._changed.notify_all()
                        self.health.tell()
                self._inbox.put(replace(drawn, request=request))
            self._require_answered(index, share)
        except RftError as error:
            if not is_lost(error):
                raise
            return error
        return None

    def _require_answered(self, index: int, share: Sequence[int]) -> None:
        """Raise `ServiceError` where a request of a call that has ended is without a result."""
        with self._changed:
            missing = sum(request in self._open for request in share)
        # nobody would draw these again, and everyone would wait for them without end
        if missing:
            number = self._replicas[index].number
            raise garbage(f"replica {number} ended a call of {len(share)} requests without a result for {missing}")

    def _load(self, index: int) -> None:
        if self._versions[index] != self._weights.version:
            # a load that fails half-way leaves neither version
            self._versions[index] = None
            self._replicas[index].load(self._weights)
            self._versions[index] = self._weights.version

    def _next_share(self) -> list[int]:
        """Return the requests left over by lost replicas; an empty list once all are done or the call ends."""
        with self._changed:
            while self._open and not self._left_over and not self._ending:
                self._changed.wait(_WAIT_SECONDS)
            share, self._left_over = ([] if self._ending else self._left_over), []
            return share

    def _give_away(self, share: Sequence[int], error: RftError) -> None:
        with self._changed:
            lost = [request for request in share if request in self._open]
            self._losses.update(lost)
            # a request that ends whatever draws it would end the replicas one after another, without end
            if lost and max(self._losses[request] for request in lost) > _MOST_LOSSES:
                raise _deadly(len(lost), error) from error
            self.num_reissued += len(lost)
            ending = self._ending
            # nobody takes shares any more, so these are answered without tokens, and drawn by a later call
            if ending:
                self._open.difference_update(lost)
            else:
                self._left_over += lost
            self._changed.notify_all()
        for request in lost if ending else []:
            self._inbox.put(SampledTokens(request, (), (), (), "interrupted", self._weights.version))

    def _is_over(self) -> bool:
        # asked under the lock of `health`, inside which this one's is never taken; both values only ever go one way
        return self._ending or not self._open

    def _require_a_replica(self) -> None:
        """Raise the error that all replicas are gone where requests are left that nobody draws any more."""
        if not self._is_over() and (error := self.health.all_gone):
            raise error


def _deadly(num: int, error: RftError) -> ServiceError:
    return ServiceError(
        code="engine.replicas.die",
        what=f"{num} samples were given to {_MOST_LOSSES + 1} engine replicas, and each of those ended; the last: "
        f"{error.problem.what}",
        where=error.problem.where,
        why="a lost sample is given to another replica a few times, and every replica that tried these has ended",
        state="no weights are lost; samples that were finished are kept until the last checkpoint is resumed",
        do="see the end of the log; fewer rows take less memory: --engine_max_rows N",
    )
