"""Stop signals: a handler sets a flag, which the loop checks where stopping loses nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import torch

from rft_trainer.protocols import Collectives

BY_PROGRAM = "a stop of the program"
"""The name in the place of a signal where code of the program asked for the stop."""
_STDERR = 2
_WAITING = b"\nstopping: this step is finished and saved first; Ctrl-C again loses it and all since the last save\n"


@dataclass(frozen=True, slots=True)
class AlarmStop:
    """End of a run that an alarm of its health asks for (`--on_alarm`)."""

    what: str
    """The alarm in one sentence."""
    do: str
    """What to change or to look at."""
    pauses: bool
    """Whether the run asks to be started again."""


class StopSignals:
    """Signal handlers: SIGTERM, SIGINT and SIGUSR1 request a save and an orderly end; a second SIGINT stops at once.

    SIGUSR1 is what SLURM sends ahead of a time limit. Only the main thread of a program can handle signals: in another
    one nothing is installed, and `received` is set by whoever asks for the stop.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self.alarm: AlarmStop | None = None
        """Of the rank that looks at the rows, which is the first."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        _IN_FORCE.append(self)
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._SIGNALS:
            # kept, because a program may go on after the run with the handlers that it had
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _IN_FORCE.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            # a second SIGTERM is not enough: schedulers may send it more than once, and the save is under way
            raise KeyboardInterrupt
        is_first, self.received = self.received is None, signal.Signals(number).name
        # no more than this in a handler, which may run between any two lines of the loop; the terminal may be gone
        if is_first and number == signal.SIGINT:
            with suppress(OSError):
                os.write(_STDERR, _WAITING)


_IN_FORCE: list[StopSignals] = []


def in_force() -> StopSignals:
    """Return the handlers that are in force in this process, as signals are; without any, none that has received."""
    return _IN_FORCE[-1] if _IN_FORCE else StopSignals()


def agreed_alarm(signals: StopSignals, collectives: Collectives) -> AlarmStop | None:
    """Return the alarm that the first rank has, on every rank; all of them call it."""
    if collectives.world_size == 1:
        return signals.alarm
    own = json.dumps(asdict(signals.alarm) if signals.alarm else None).encode()
    first = json.loads(collectives.gather_bytes(own)[0])
    return None if first is None else AlarmStop(**first)


def stop_requested() -> bool:
    """Return whether this process was asked to stop."""
    return in_force().received is not None


def agree(collectives: Collectives, *votes: bool) -> tuple[bool, ...]:
    """Return each vote as true where any rank votes true: a rank that decides alone would leave others waiting."""
    if collectives.world_size == 1:
        return votes
    # all votes in one exchange
    return tuple(bool(x) for x in collectives.max(torch.tensor([float(vote) for vote in votes])).tolist())
