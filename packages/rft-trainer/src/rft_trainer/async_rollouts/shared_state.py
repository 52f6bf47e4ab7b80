"""State that the threads of a queue share, and the one lock that guards it.

A thread that changes something notifies; a waiting thread checks at least every half second whether a thread has
failed and whether anything has moved for `patience` seconds. So every wait ends, and an error of any thread is
raised in the trainer's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OutageError, ServiceError
from rft_trainer.async_rollouts.partial_rollout import PartialGroup
from rft_trainer.batches.prompt_ledger import LedgerEntry

LOOK_SECONDS = 0.5


@dataclass(slots=True)
class TrainerRequest:
    """A function that the rollout thread runs between two draws for a waiting thread."""

    run: Callable[[], Any]
    version: int
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False


class SharedState:
    """Groups in progress and their counters; everything is read and changed under `changed`."""

    def __init__(self, patience: float) -> None:
        self.changed = threading.Condition()
        self.groups: dict[LedgerEntry, PartialGroup] = {}
        self.to_score: deque[PartialGroup] = deque()
        self.requests: deque[TrainerRequest] = deque()
        self.version = 0
        """Number of steps in the newest weights: their version."""
        self.generation = 0
        """Grows with every version and every prompt that is added: a running draw then no longer covers all."""
        self.answered = 0
        """Samples that may be drawn on since the present draw began, because they were answered."""
        self.is_closing = False
        self.error: BaseException | None = None
        self.outage: OutageError | None = None
        """Why the scoring thread has ended, where a reward server is away; samples that are whole can be saved."""
        self.doing = "nothing yet"
        """Activity of the rollout thread, for error messages."""
        self._patience, self._moved_at = patience, time.monotonic()
        self._threads: list[threading.Thread] = []

    def tell(self) -> None:
        """Notify of new work: wake all waiting threads, and interrupt a draw that may be interrupted."""
        self.generation += 1
        self.moved()

    def moved(self) -> None:
        """Record progress and wake all waiting threads."""
        self._moved_at = time.monotonic()
        self.changed.notify_all()

    def touch(self) -> None:
        """Record progress for which no thread waits."""
        self._moved_at = time.monotonic()

    def queue_if_complete(self, group: PartialGroup) -> None:
        """Queue a group whose last sample has ended for the scoring thread; it is queued once."""
        if group.is_complete and group.group is None:
            self.to_score.append(group)
            self.moved()

    def start(self, loops: Mapping[str, Callable[[], None]]) -> None:
        """Start one thread a loop, by name; does nothing when they run, or after `close`."""
        # called with every submission and every request; the first one starts the threads
        if self._threads or self.is_closing:
            return
        for name, loop in loops.items():
            # daemon threads: one that hangs in an engine must not keep the process from ending
            thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop all threads of the queue."""
        with self.changed:
            self.is_closing = True
            self.tell()
        # without the lock, which each of them needs to see that it is to end
        for thread in self._threads:
            if thread is not threading.current_thread():  # a thread cannot join itself
                thread.join(timeout=10.0)
        self._threads = []

    def wait(self, holds: Callable[[], bool], what: str, *, despite_outage: bool = False) -> None:
        """Wait until `holds()`, called under the lock; raise another thread's error, or `ServiceError` when late.

        `despite_outage`: also while a reward server is away, for what needs no rewards.
        """
        with self.changed:
            while not holds():
                # before the time is looked at: a thread that failed is why nothing moves
                if self.error is not None:
                    raise self.error
                if self.outage is not None and not despite_outage:
                    raise self.outage
                still = time.monotonic() - self._moved_at
                if still > self._patience:
                    raise self._late(what, still)
                # with a limit: nobody notifies when patience runs out
                self.changed.wait(LOOK_SECONDS)

    @contextmanager
    def noted(self, doing: str) -> Iterator[None]:
        """Record the activity of the rollout thread while the block runs; after a failure the record stays."""
        self.doing = doing
        yield  # no `finally`: after an error the message says what was being done
        self.doing = "waits for work"

    def _guarded(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop; an error that ends it is raised in the trainer's thread."""
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            error.add_note(f"in the thread {threading.current_thread().name}: {self.doing}")
            with self.changed:
                self.error = self.error or error  # the first error; later ones follow from it
                self.changed.notify_all()

    def _late(self, what: str, seconds: float) -> ServiceError:
        missing = [group for group in self.groups.values() if group.group is None]
        num_complete = sum(group.is_complete for group in missing)
        return ServiceError(
            code="rollouts.late",
            what=f"nothing has moved for {seconds:.0f} s while the trainer waits for {what}: {len(missing)} groups are "
            f"missing, of which {num_complete} wait for their rewards; the rollout thread: {self.doing}",
            where=f"rollouts ahead of step {self.version + 1}",
            why=f"a wait is given up after {self._patience:g} s without a new sample, reward or version",
            state="no weight was changed by this step; the last checkpoint holds what was in flight then",
            do="see the engines' logs; where a reward takes longer, raise --reward_timeout",
        )
