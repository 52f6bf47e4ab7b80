"""Health of a run: the detectors, applied to its rows one after the other.

The run that goes on and the pages of a run that has ended use the same watch, so that both say the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rft_trainer.health.detector import Detector, Level
from rft_trainer.health.detectors import DETECTORS
from rft_trainer.health.history import History, Row


@dataclass(frozen=True, slots=True)
class Alarm:
    """Finding of one detector, at the step at which it first became true."""

    name: str
    """Of the detector."""
    level: Level
    step: int
    value: float
    """Of the detector's metric."""
    what: str
    """One sentence with the value."""
    do: str
    """What to change or to look at."""
    setting: str
    """The setting that is most related."""

    def as_record(self) -> dict[str, Any]:
        """Return the alarm as plain JSON."""
        return asdict(self)


class HealthWatch:
    """Watch over the rows of one run; each detector speaks once.

    Example::

        watch = HealthWatch("rl")
        for row in rows:
            for alarm in watch.step(row):
                print(alarm.step, alarm.name, alarm.what)
    """

    def __init__(self, command: str = "", rollouts: Callable[[], str] = str) -> None:
        """Begin without a row.

        Args:
            command: that makes the run (`rl`, `sft`, ...).
            rollouts: returns the file of the last rollouts that were kept; empty without any.
        """
        self.alarms: list[Alarm] = []
        """All so far, in the order in which they became true."""
        self._history = History(command)
        self._rollouts = rollouts
        self._waiting: list[Detector] = list(DETECTORS)

    def step(self, row: Row) -> list[Alarm]:
        """Take the row of the next step; return what has become true with it."""
        if not isinstance(row.get("step"), int):
            return []
        self._history.add(row)
        self._history.rollouts = self._rollouts()
        found = [alarm for detector in self._waiting if (alarm := self._alarm(detector)) is not None]
        if found:
            said = {alarm.name for alarm in found}
            self._waiting = [detector for detector in self._waiting if detector.name not in said]
            self.alarms += found
        return found

    def evaluation(self, row: Row) -> None:
        """Take the row of an evaluation, which the rows after it are compared with."""
        self._history.evaluation = row

    def _alarm(self, detector: Detector) -> Alarm | None:
        measured = detector.rule(self._history, detector.window, detector.threshold)
        if measured is None:
            return None
        what = detector.says.format(
            value=measured.value, detail=measured.detail, window=detector.window, threshold=detector.threshold
        )
        return Alarm(
            name=detector.name,
            level=detector.level,
            step=int(self._history.row["step"]),
            value=measured.value,
            what=what,
            do=measured.do or detector.do,
            setting=detector.setting,
        )


def replay(rows: Sequence[Row], evaluations: Sequence[Row] = (), command: str = "", rollouts: str = "") -> list[Alarm]:
    """Return the alarms of a run from its rows, as the run itself would have given them."""
    return replayed(HealthWatch(command, lambda: rollouts), rows, evaluations).alarms


def replayed(watch: HealthWatch, rows: Sequence[Row], evaluations: Sequence[Row] = ()) -> HealthWatch:
    """Give a watch the rows of a run; a step is evaluated behind its row, and before the next one."""
    waiting = deque(row for row in evaluations if _step(row) is not None)
    for row in rows:
        while waiting and (_step(waiting[0]) or 0) < (_step(row) or 0):
            watch.evaluation(waiting.popleft())
        watch.step(row)
    for row in waiting:
        watch.evaluation(row)
    return watch


def _step(row: Mapping[str, Any]) -> int | None:
    step = row.get("step")
    return step if isinstance(step, int) else None
