"""Heartbeats and the cause of failure, exchanged through the TCP store of the rendezvous.

The store is served by C++ threads of its process, so it answers while the collectives hang and while
Python computes. A call on it may block for ever where that process is stopped: only `HeartbeatClient`, in a
thread of its own, makes them, and nobody waits for it without a limit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from rft_dist.health import failure as causes
from rft_dist.health.failure import Cause
from rft_dist.health.heartbeat import LastSeen, Status, decode

_CAUSE = "cause"
_READ = "cause_read"


class StatusSource(Protocol):
    """Source of this rank's status for `HeartbeatClient`."""

    def status(self) -> Status:
        """Return this rank's current status."""
        ...


class HeartbeatClient:
    """Publishes this rank's status, and reads those of others, about every `beat` seconds."""

    def __init__(self, store: Store, outlook: StatusSource, *, rank: int, world_size: int, beat: float) -> None:
        self._thread = threading.Thread(target=self._run, name="rft-watch-courier", daemon=True)
        self._store, self._outlook = store, outlook
        self._rank, self._world_size, self._beat = rank, world_size, beat
        self._operations: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._present: set[int] = set()
        self.reads_all = False
        self.read_at: dict[int, float] = {}
        """When each rank's status was last read, new or not."""
        self.seen: dict[int, LastSeen] = {}
        self.cause: Cause | None = None
        self.answered = time.monotonic()
        """When the store last answered."""
        self.lost = ""
        """Why it no longer does, once the connection has ended."""

    def start(self) -> None:
        """Start the thread that exchanges heartbeats."""
        self._thread.start()

    def _run(self) -> None:
        """Exchange heartbeats until `stop` is called or the store is lost."""
        next_beat = 0.0
        try:
            # every call on the store is made here: one that blocks holds up this thread alone
            while not self._stop.is_set():
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._beat
                    self._exchange()
                self._run_operation(min(next_beat - time.monotonic(), self._beat))
        except RuntimeError as error:  # torch.distributed.DistError and its kinds
            self.lost = (str(error).splitlines() or ["no reason was given"])[0][:200]
            self._refuse_operations()

    def stop(self) -> None:
        """End after what is under way; a call that the store does not answer is left behind."""
        self._stop.set()
        # wakes the thread, which waits for an operation
        self._operations.put((lambda: None, threading.Event()))
        self._thread.join(timeout=2.0)

    def ask(self, operation: Callable[[Store], object], seconds: float) -> bool:
        """Run `operation` on the store in the client's thread; return whether it was done within `seconds`."""
        done = threading.Event()
        # queued before the thread is looked at: one that is just ending answers what it finds in the queue
        self._operations.put((lambda: operation(self._store), done))
        if not self._thread.is_alive():
            return False
        return done.wait(seconds) and not self.lost

    def publish(self, cause: Cause, seconds: float) -> Cause:
        """Set the cause unless there is one; return the one in force (`cause` where the store does not answer)."""

        def set_cause(store: Store) -> None:
            # one step of the store: of several causes the first stays, and all ranks get that one
            current = store.compare_set(_CAUSE, "", cause.encode())
            self.cause = causes.decode(current)

        self.ask(set_cause, seconds)
        return self.cause or cause

    def announce_now(self, seconds: float) -> bool:
        """Publish this rank's status at once."""
        return self.ask(lambda store: self._publish(), seconds)

    @property
    def has_all_heartbeats(self) -> bool:
        """True where every rank has sent a heartbeat."""
        return len(self._present) == self._world_size

    def read_everyone(self, seconds: float) -> bool:
        """Bring `seen` up to date for all ranks."""
        return self.ask(lambda store: self._read(range(self._world_size)), seconds)

    def acknowledge(self, seconds: float) -> None:
        """Count this rank among those that know the cause."""
        self.ask(lambda store: self._count(1), seconds)

    def num_acknowledged(self, seconds: float) -> int:
        """Return the number of ranks that know the cause, 0 where the store does not answer."""
        counts: list[int] = []
        self.ask(lambda store: counts.append(self._count(0)), seconds)
        return counts[0] if counts else 0

    def _count(self, more: int) -> int:
        return int(self._store.add(_READ, more))

    def _exchange(self) -> None:
        self._publish()
        # The first rank reads all. The others read it alone, but all until they know whom they share a machine
        # with, once it has left, and while something is wrong with a process that they can see.
        left = 0 in self.seen and bool(self.seen[0].status.ended)
        everyone = self._rank == 0 or left or self.reads_all or not self.has_all_heartbeats
        self._read(range(self._world_size) if everyone else (0,))
        if self.cause is None and self._store.check([_CAUSE]):
            self.cause = causes.decode(self._store.get(_CAUSE))
        self.answered = time.monotonic()

    def _publish(self) -> None:
        self._store.set(f"status/{self._rank}", self._outlook.status().encode())

    def _read(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self._present and self._store.check([f"status/{rank}"]):
                self._present.add(rank)
        # without keys that are not set yet, for which the store would make this thread wait
        present = [rank for rank in ranks if rank in self._present]
        if not present:
            return
        now = time.monotonic()
        for rank, text in zip(present, self._store.multi_get([f"status/{rank}" for rank in present]), strict=True):
            status = decode(text)
            self.read_at[rank] = now
            known = self.seen.get(rank)
            # a heartbeat that was read before is no new sign of life, and keeps its time
            if known is None or known.status.beat != status.beat:
                self.seen[rank] = LastSeen(status, now)

    def _run_operation(self, seconds: float) -> None:
        try:
            work, done = self._operations.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return
        work()
        self.answered = time.monotonic()
        done.set()

    def _refuse_operations(self) -> None:
        while not self._operations.empty():
            self._operations.get_nowait()[1].set()
