"""Stop signals: a handler sets a flag, which the loop checks where stopping loses nothing."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from rft_trainer.protocols import Collectives


class StopSignals:
    """Signal handlers: SIGTERM, SIGINT and SIGUSR1 request a save and an orderly end; a second SIGINT stops at once.

    SIGUSR1 is what SLURM sends ahead of a time limit.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in self._SIGNALS:
            # kept, because a program may go on after the run with the handlers that it had
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            # a second SIGTERM is not enough: schedulers may send it more than once, and the save is under way
            raise KeyboardInterrupt
        # no more than this in a handler, which may run between any two lines of the loop
        self.received = signal.Signals(number).name


def agree(collectives: Collectives, *votes: bool) -> tuple[bool, ...]:
    """Return each vote as true where any rank votes true: a rank that decides alone would leave others waiting."""
    if collectives.world_size == 1:
        return votes
    # all votes in one exchange
    return tuple(bool(x) for x in collectives.max(torch.tensor([float(vote) for vote in votes])).tolist())
