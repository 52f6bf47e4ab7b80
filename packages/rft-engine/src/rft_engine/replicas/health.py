"""States of the replicas of an engine: lost ones are started again beside the others, a few times.

A replica is ready, starting, or gone for good. One that is lost starts again in a thread of its own, so that nobody
waits for it while another can draw; what it draws next begins with a load of the weights. Its losses in a row count:
a share that it finishes begins the count anew. The run ends when all are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rft_core.errors import Problem, RftError, ServiceError
from rft_engine.weight_sync.shared_memory import WeightSnapshot

MOST_RESTARTS = 3
_PAUSE_SECONDS = (0.0, 1.0, 5.0)
"""Before each restart in a row: what a dead process held of a device is free only after a moment."""
_END_SECONDS = 5.0


class Restartable(Protocol):
    """Methods of a replica that are needed to start it again."""

    number: int

    def restart(self, newest: Callable[[], WeightSnapshot]) -> None:
        """Start another process; the next `load` brings the weights, or this one where the engine starts with some."""
        ...


class ReplicaHealth:
    """States of the replicas of one engine. Several threads may use it."""

    def __init__(
        self,
        replicas: Sequence[Restartable],
        versions: list[int | None] | None = None,
        *,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Begin with all replicas ready.

        Args:
            replicas: started, or lost at once with `lost`.
            versions: of the weights that each holds, by its place; kept here.
            notify: called with a text at every loss and every end of one.
        """
        self.replicas = replicas
        self.versions: list[int | None] = [None] * len(replicas) if versions is None else versions
        self.weights: WeightSnapshot | None = None
        """The newest that a restarted replica is to load; None before the first."""
        self._notify = notify or _say_nothing
        self._changed = threading.Condition()
        self._starting: dict[int, threading.Thread] = {}
        self._gone: dict[int, Problem] = {}
        self._losses = [0] * len(replicas)
        self._num_restarts = 0
        self._closed = False

    def is_ready(self, index: int) -> bool:
        """Return whether this replica can be asked."""
        with self._changed:
            return index not in self._starting and index not in self._gone

    @property
    def ready(self) -> list[int]:
        """Places of the replicas that can be asked."""
        return [index for index in range(len(self.replicas)) if self.is_ready(index)]

    @property
    def remaining(self) -> list[int]:
        """Places of the replicas that are ready or start again."""
        with self._changed:
            return [index for index in range(len(self.replicas)) if index not in self._gone]

    def lost(self, index: int, error: RftError) -> None:
        """Start a replica again that is gone, in a thread of its own, unless it was lost too often in a row."""
        with self._changed:
            self.versions[index] = None
            if self._closed or not self._may_start_again(index, error):
                return
            thread = threading.Thread(target=self._restart, args=(index,), name=f"restart-{index}", daemon=True)
            self._starting[index] = thread
            thread.start()

    def worked(self, index: int) -> None:
        """Count the losses of a replica anew, as it has finished a share."""
        with self._changed:
            self._losses[index] = 0

    def wait(self, index: int, is_over: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a replica no longer starts, `is_over()`, or for `seconds`; return whether it is ready then."""
        with self._changed:
            self._changed.wait_for(lambda: index not in self._starting or is_over(), seconds)
        return self.is_ready(index)

    def tell(self) -> None:
        """Have those who `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def require_one(self) -> None:
        """Wait until at least one replica is ready.

        Raises:
            ServiceError: all are gone for good; it names each with the end of its log.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._starting) + len(self._gone) < len(self.replicas) or self._all_gone or self._closed
            )
            if self._all_gone:
                raise self._error()

    @property
    def all_gone(self) -> ServiceError | None:
        """The error that every replica is gone for good; None while one is not."""
        with self._changed:
            return self._error() if self._all_gone else None

    def taken_restarts(self) -> int:
        """Return how many restarts were begun since the last call."""
        with self._changed:
            taken, self._num_restarts = self._num_restarts, 0
            return taken

    def close(self, end: Callable[[], None]) -> None:
        """Start nothing again from now on; `end` ends the replicas, and once more those that were just starting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            starting = list(self._starting.values())
        end()
        for thread in starting:
            thread.join(_END_SECONDS)
        if starting:
            end()

    @property
    def _all_gone(self) -> bool:
        return len(self._gone) == len(self.replicas)

    def _may_start_again(self, index: int, error: RftError) -> bool:
        """Count a loss, say it, and return whether another start is tried; the lock is held."""
        self._losses[index] += 1
        number, left = self.replicas[index].number, MOST_RESTARTS + 1 - self._losses[index]
        if left > 0:
            self._num_restarts += 1
            again = f"it is started again ({self._losses[index]} of {MOST_RESTARTS} times in a row)"
        else:
            self._gone[index] = error.problem
            again = f"it is given up after {MOST_RESTARTS} restarts"
        others = len(self.replicas) - len({*self._gone, *self._starting, index})
        self._notify(
            f"engine replica {number} is lost: {error.problem.what}; {again}; ready beside it: {others} of "
            f"{len(self.replicas)} ({_log_of(error)})"
        )
        self._changed.notify_all()
        return left > 0

    def _restart(self, index: int) -> None:
        while True:
            with self._changed:
                pause = _PAUSE_SECONDS[self._losses[index] - 1]
                if self._changed.wait_for(lambda: self._closed, pause):
                    return
                weights = self.weights
            fault: RftError | None = None
            try:
                self.replicas[index].restart(self._newest)
            except RftError as error:
                fault = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the others can draw without this one
                fault = _broken(self.replicas[index].number, error)
            with self._changed:
                # weights that were replaced meanwhile may be gone from the store: no fault of the replica
                is_newest = self.weights is weights
                if fault is not None and (self._closed or not is_newest or self._may_start_again(index, fault)):
                    continue
                if fault is None:
                    # also where it was given some: others may have come under the same version
                    self.versions[index] = None
                    self._notify(f"engine replica {self.replicas[index].number} is back")
                del self._starting[index]
                self._changed.notify_all()
                return

    def _newest(self) -> WeightSnapshot:
        assert self.weights is not None, "weights come before the first loss"
        return self.weights

    def _error(self) -> ServiceError:
        ends: Mapping[int, Problem] = self._gone
        named = [f"replica {self.replicas[index].number}: {problem.what}" for index, problem in sorted(ends.items())]
        logs = [f"replica {self.replicas[index].number}: {problem.where}" for index, problem in sorted(ends.items())]
        return ServiceError(
            code="engine.replicas.gone",
            what=f"all {len(self.replicas)} engine replicas are gone, each after {MOST_RESTARTS} restarts in a row; "
            + "; ".join(named),
            where="; ".join(logs),
            why="samples are drawn by replicas, and none can be started any more",
            state="no weights are lost: the trainer holds those of the last whole step",
            do="see the ends of the logs; then resume the run",
        )


def _say_nothing(text: str) -> None:
    """Tell nobody."""


def _log_of(error: RftError) -> str:
    return " ".join(error.problem.where.split())[:300]


def _broken(number: int, error: Exception) -> ServiceError:
    return ServiceError(
        code="engine.replicas.restart",
        what=f"replica {number} did not start again: {type(error).__name__}: {error}",
        where=f"restart of engine replica {number}",
        why="a lost replica is started again with the weights that it had",
        do="wait: the others draw its samples, and it is started again",
    )
