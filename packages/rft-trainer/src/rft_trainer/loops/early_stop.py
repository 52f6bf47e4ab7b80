"""Early stopping on the loss of the evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class EarlyStop:
    """Early stopping on the validation loss after `patience` evaluations without a fall; 0 never ends a run.

    A fall counts for patience where it is more than `min_improvement` (nats a token) below the last one
    that counted; `best` is the lowest loss of all. A loss at or below `target` ends it at once; 0 never does.
    """

    patience: int
    min_improvement: float = 0.0
    target: float = 0.0
    best: float = math.inf
    best_step: int = 0
    mark: float = math.inf
    waited: int = 0

    @property
    def stopped(self) -> bool:
        """Return whether patience is used up, or the target is reached."""
        return 0 < self.patience <= self.waited or (self.target > 0 and self.best <= self.target)

    def observe(self, loss: float, step: int) -> bool:
        """Record the validation loss of `step` and return whether to stop."""
        if loss < self.best:
            self.best, self.best_step = loss, step
        if loss < self.mark - self.min_improvement:
            self.mark, self.waited = loss, 0
        else:
            self.waited += 1
        return self.stopped

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON; `best` and `mark` are null before the first loss."""
        best, mark = (None if math.isinf(value) else value for value in (self.best, self.mark))
        return {"best": best, "best_step": self.best_step, "mark": mark, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state()` returned."""
        self.best, self.mark = (math.inf if state[name] is None else float(state[name]) for name in ("best", "mark"))
        self.best_step, self.waited = int(state["best_step"]), int(state["waited"])
