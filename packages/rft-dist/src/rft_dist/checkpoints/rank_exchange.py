"""Exchange of results between the ranks of a save, errors included.

A rank that fails does not stay away: its error travels inside the bytes that all exchange at the
end of a phase, so nobody waits for it, and every rank raises it. There is no barrier anywhere.

A save in the background must not use the collectives of training: two threads would order them
differently on two ranks. It has a channel of its own on the store at which the ranks met (`StoreExchange`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import CheckpointError, OptionsError, PeerError, Problem, RftError, StorageError
from rft_core.exact_records import exact_bytes, exact_value
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.launch.rendezvous import another_client

_CLASSES: dict[str, type[RftError]] = {
    kind.__name__: kind for kind in (CheckpointError, StorageError, PeerError, OptionsError)
}


class Exchange(Protocol):
    """Bytes from every rank to every rank; the collectives of a run fulfil it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order, on every rank."""
        ...


_NUMBERS = count()
"""Of the channels of this process: every rank opens as many, in the same order."""


class StoreExchange:
    """An exchange over a connection to a TCP store that belongs to it alone, for one thread of each rank."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float = 600.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._num_calls = 0

    @classmethod
    def beside(cls, collectives: Exchange, timeout: float = 600.0) -> StoreExchange:
        """Open a separate channel on the rendezvous store; every rank must call it.

        That store is served until all ranks have ended, by rank 0 or by torchrun. `timeout` is in seconds.
        """
        # a connection of its own: a call that waits keeps out all others on the same one
        store = another_client(ranks_from_environment(), os.environ)
        store.set_timeout(timedelta(seconds=timeout))
        store = PrefixStore(f"saves/{next(_NUMBERS)}", store)
        return cls(store, collectives.rank, collectives.world_size, timeout)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank; raise PeerError naming the first that did not come in time."""
        number, rank = self._num_calls, 0
        # each exchange has keys of its own: a rank that is ahead overwrites nothing that is still to be read
        self._num_calls += 1
        gathered: list[bytes] = []
        try:
            self._store.set(f"{number}/{self.rank}", data)  # pyright: ignore[reportArgumentType] - bytes are taken as well
            for rank in range(self.world_size):
                gathered.append(bytes(self._store.get(f"{number}/{rank}")))
            if number:  # whoever has come to this exchange has read the one before
                self._store.delete_key(f"{number - 1}/{self.rank}")
        except RuntimeError as error:  # every error of torch.distributed is one
            raise PeerError(
                code="checkpoint.peer_missing",
                what=f"rank {rank} did not take part in a save within {self._timeout:g} s (exchange #{number + 1})",
                where=f"rank {self.rank} of {self.world_size}",
                why=f"it died, hangs or saves another step: {str(error).splitlines()[0][:200]}",
                state="the save was not acknowledged; the checkpoints before it are untouched",
                do="read the first error among logs/rank_*.log, then resume from the last checkpoint",
            ) from error
        return gathered


def collective_call(exchange: Exchange, work: Callable[[], Any]) -> list[Any]:
    """Do this rank's part, and give the results of all ranks (JSON values), in rank order; floats keep their bits.

    Where any rank raised, every rank raises: its own error, or else that of the lowest rank that failed.
    """
    if exchange.world_size == 1:
        return [work()]
    own: Exception | None = None
    try:
        result = {"done": work()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this answer
        own, result = error, {"error": _as_json(error, exchange.rank)}
    answers = [exact_value(answer) for answer in exchange.gather_bytes(exact_bytes(result))]
    # only after the exchange: a rank that raised before it would leave the others waiting
    if own is not None:
        raise own
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise _from_json(answer["error"], rank)
    return [answer["done"] for answer in answers]


def _as_json(error: Exception, rank: int) -> dict[str, Any]:
    if isinstance(error, RftError) and type(error).__name__ in _CLASSES:
        return {"class": type(error).__name__, "problem": asdict(error.problem)}
    problem = Problem(
        code="checkpoint.rank_failed",
        what=f"rank {rank} failed while saving: {type(error).__name__}: {str(error)[:300]}",
        where=f"rank {rank}",
        why="a checkpoint needs the parts of every rank",
        state="the save was not acknowledged; the checkpoints before it are untouched",
        do=f"read logs/rank_{rank}.log",
    )
    return {"class": "PeerError", "problem": asdict(problem)}


def _from_json(value: dict[str, Any], rank: int) -> RftError:
    problem = Problem(**value["problem"])
    problem = replace(problem, where=f"rank {rank}: {problem.where}")
    return _CLASSES[value["class"]](**asdict(problem))
