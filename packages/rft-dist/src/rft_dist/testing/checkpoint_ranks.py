"""Ranks as threads of one process, for tests of what the ranks of a save do together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rft_core.errors import PeerError

WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Table:
    """Bytes that the ranks have contributed, exchange by exchange."""

    world_size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    rounds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    gone: bool = False


class ThreadExchange:
    """An exchange between threads; a rank that has ended makes the others stop with PeerError."""

    def __init__(self, table: _Table, rank: int) -> None:
        self.rank = rank
        self.world_size = table.world_size
        self._table = table
        self._num_calls = 0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        with self._table.changed:
            answers = self._table.rounds.setdefault(number, {})
            answers[self.rank] = data
            self._table.changed.notify_all()
            complete = self._table.changed.wait_for(
                lambda: len(answers) == self.world_size or self._table.gone, WAIT_SECONDS
            )
            if not complete or len(answers) < self.world_size:
                raise PeerError(
                    code="testing.rank_ended",
                    what=f"{self.world_size - len(answers)} ranks did not come",
                    where=f"rank {self.rank}",
                    why="their threads have ended",
                    do="mend the error of the rank that ended first",
                )
            return [answers[rank] for rank in range(self.world_size)]


def run_ranks(world_size: int, work: Callable[[ThreadExchange], Any]) -> list[Any]:
    """`work(exchange)` on every rank, each in a thread "rank <n>": what it returned, or the exception it raised."""
    table = _Table(world_size)
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ThreadExchange(table, rank))
        except BaseException as error:  # noqa: BLE001 - an outcome like any other
            outcomes[rank] = error
            with table.changed:
                table.gone = True
                table.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
