"""One queue before a reward: requests are scored one after another, or several in one call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rft_core.errors import ServiceError
from rft_trainer.records.scores import Reward, RewardItem, Score


class QueueFull(Exception):
    """More requests wait than may."""


@dataclass(slots=True)
class Counters:
    """Figures of a server since its start."""

    started: float = field(default_factory=time.monotonic)
    requests: int = 0
    """Answered ones."""
    responses: int = 0
    unscored: int = 0
    failures: int = 0
    """Requests whose call raised."""
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    items: Sequence[RewardItem]
    scores: Future[list[Score]]


class ScoringQueue:
    """Calls a reward in a thread of its own, which is the only one that calls it."""

    def __init__(self, reward: Reward, *, most_waiting: int, batch_size: int = 0) -> None:
        """Start the thread.

        Args:
            reward: closed by `close`.
            most_waiting: requests that may wait.
            batch_size: most responses of several requests in one call; 0 = a call a request.
        """
        self.counters = Counters()
        self._reward = reward
        self._most_waiting = most_waiting
        self._batch_size = batch_size
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="reward", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests whose call has not begun."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """True while requests are scored."""
        return self._thread.is_alive() and not self._is_closed

    def add(self, items: Sequence[RewardItem]) -> Future[list[Score]]:
        """Put a request into the queue and return its scores to come; one that is cancelled is not scored.

        Raises:
            QueueFull: too many wait.
            ServiceError: the queue is closed.
        """
        entry = _Entry(items, Future())
        with self._changed:
            if self._is_closed:
                raise ServiceError(
                    code="serving.closed",
                    what="the server is closing",
                    where="POST /score",
                    why="it finishes what it has begun, and begins nothing",
                    do="ask again when it runs",
                )
            self._waiting = deque(one for one in self._waiting if not one.scores.cancelled())
            if len(self._waiting) >= self._most_waiting:
                raise QueueFull
            self._waiting.append(entry)
            self._changed.notify()
        return entry.scores

    def close(self) -> None:
        """Finish the call that is under way, cancel what waits, and close the reward."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for entry in self._waiting:
                entry.scores.cancel()
            self._changed.notify()
        self._thread.join()
        self._reward.close()

    def _work(self) -> None:
        while entries := self._next():
            self._score(entries)

    def _next(self) -> list[_Entry]:
        """Return the requests of the next call; none when the queue is closed."""
        with self._changed:
            while True:
                chosen: list[_Entry] = []
                num = 0
                while self._waiting and not self._is_closed:
                    following = len(self._waiting[0].items)
                    if chosen and num + following > self._batch_size:
                        break
                    entry = self._waiting.popleft()
                    # False for one that was cancelled while it waited
                    if entry.scores.set_running_or_notify_cancel():
                        chosen.append(entry)
                        num += following
                if chosen or self._is_closed:
                    return chosen
                self._changed.wait()

    def _score(self, entries: Sequence[_Entry]) -> None:
        items = [item for entry in entries for item in entry.items]
        counters = self.counters
        try:
            scores = self._reward(items)
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the answer to its requests alone
            counters.failures += len(entries)
            counters.last_failure = f"{type(error).__name__}: {error}"
            for entry in entries:
                entry.scores.set_exception(error)
            return
        counters.requests += len(entries)
        counters.responses += len(items)
        counters.unscored += sum(score.value is None for score in scores)
        start = 0
        for entry in entries:
            entry.scores.set_result(scores[start : start + len(entry.items)])
            start += len(entry.items)
