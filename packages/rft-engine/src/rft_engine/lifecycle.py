"""The states of an engine (ready, asleep, closed), the transitions allowed, and a history of the last ones.

```
          sleep            close
  ready ---------> asleep -------> closed        ready -> closed too; nothing leaves closed
    ^                |
    +----- wake -----+
```

Asking for the state that is already there is recorded and ignored, so that two callers may both
put an engine to sleep. Level 2 gives the weights up as well: after `wake`, generation is refused
until weights are loaded again, because an engine that serves leftover memory raises no error.
"""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rft_core.errors import OptionsError, ServiceError

_HISTORY_LENGTH = 5
_PACKAGE = str(Path(__file__).parent)


class EngineState(StrEnum):
    """Lifecycle state of an engine: ready, asleep or closed."""

    READY = "ready"
    ASLEEP = "asleep"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Transition:
    """One request to change the state of an engine, and its outcome."""

    operation: str
    before: EngineState
    after: EngineState
    outcome: str
    """"done", "ignored" (it was so already) or "refused"."""
    caller: str
    """file:line of the code that asked."""

    def __str__(self) -> str:
        return f"{self.operation} {self.before}->{self.after} {self.outcome} at {self.caller}"


class StateMachine:
    """State, level of sleep, weight version and the last transitions of one engine."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.weight_version = 0
        self._has_weights = True
        self._history: deque[Transition] = deque(maxlen=_HISTORY_LENGTH)

    @property
    def history(self) -> tuple[Transition, ...]:
        """The last five transitions, oldest first."""
        return tuple(self._history)

    def sleep(self, level: int) -> bool:
        """True if the engine goes to sleep now, False if it sleeps already; level 2 also gives up the weights."""
        if level not in (1, 2):
            raise OptionsError(
                code="engine.sleep.level",
                what=f"sleep level = {level}, allowed: 1, 2",
                where="sleep(level)",
                why="level 1 frees the cache, level 2 the weights as well",
                do="level=1",
            )
        operation = f"sleep(level={level})"
        self._refuse_if_closed(operation)
        # also while asleep already: level 2 after level 1 gives the weights up
        if level == 2:
            self._has_weights = False
        return self._go(operation, EngineState.ASLEEP)

    def wake(self) -> bool:
        """True if the engine wakes now, False if it is awake already."""
        self._refuse_if_closed("wake")
        return self._go("wake", EngineState.READY)

    def close(self) -> bool:
        """True if the engine closes now, False if it is closed already."""
        return self._go("close", EngineState.CLOSED)

    def load_weights(self, version: int) -> None:
        """Record newer weights; allowed while asleep."""
        operation = f"load_weights({version})"
        self._refuse_if_closed(operation)
        if version <= self.weight_version:
            self._record(operation, self.state, "refused")
            raise ServiceError(
                code="engine.weights.not_newer",
                what=f"weights of version {version} were offered, but the engine already serves version "
                f"{self.weight_version}",
                where="load_weights(version)",
                why="versions increase, so that no token is labelled with weights that did not sample it",
                state=f"the engine still serves version {self.weight_version}",
                do=f"load_weights({self.weight_version + 1})",
            )
        self.weight_version = version
        self._has_weights = True
        self._record(operation, self.state, "done")

    def refresh(self) -> None:
        """Record that the present weights are served anew under their version; allowed while asleep."""
        operation = "refresh"
        self._refuse_if_closed(operation)
        self._has_weights = True
        self._record(operation, self.state, "done")

    def require_ready(self, operation: str) -> None:
        """Raise unless the engine is ready and holds weights."""
        self._refuse_if_closed(operation)
        if self.state is not EngineState.READY:
            self._record(operation, self.state, "refused")
            raise self._error(operation, "its cache is freed while it sleeps", "wake()")
        if not self._has_weights:
            self._record(operation, self.state, "refused")
            remedy = f"load_weights({self.weight_version + 1})"
            raise self._error(operation, "its weights were dropped by sleep(level=2) and not loaded again", remedy)

    def _refuse_if_closed(self, operation: str) -> None:
        if self.state is EngineState.CLOSED:
            self._record(operation, self.state, "refused")
            raise self._error(operation, "a closed engine cannot be used again", "a new engine in place of this one")

    def _go(self, operation: str, after: EngineState) -> bool:
        changes = self.state is not after
        # before the change: the entry has the state that was left
        self._record(operation, after, "done" if changes else "ignored")
        self.state = after
        return changes

    def _record(self, operation: str, after: EngineState, outcome: str) -> None:
        self._history.append(Transition(operation, self.state, after, outcome, _caller()))

    def _error(self, operation: str, why: str, remedy: str) -> ServiceError:
        return ServiceError(
            code="engine.state",
            what=f"engine asked to {operation} while {self.state}",
            where="in-process engine; last transitions: " + "; ".join(map(str, self._history)),
            why=why,
            state="the engine is unchanged and no sample of this call was used",
            do=remedy,
        )


def _caller() -> str:
    """file:line of the nearest frame outside this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown"
