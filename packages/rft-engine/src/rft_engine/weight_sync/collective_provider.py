"""Full weights gathered by all ranks, for an engine that may request them at any time.

Where weights are sharded, reading a whole tensor is an exchange of all ranks. An engine in a process of its own
asks for the weights again when that process has died, which happens on one rank alone: the exchange would wait for
ranks that generate. So weights are given only in calls that all ranks make, once in each of them, and to the end:
a rank that breaks off goes through the rest, so that no rank waits for it, and then fails with a typed error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from rft_core.errors import ServiceError

Provider = Callable[[], Iterable[tuple[str, Tensor]]]


class CollectiveWeightProvider:
    """Weight provider that refuses a request outside of a call that all ranks make."""

    def __init__(self, provider: Provider, *, rank: int) -> None:
        """`provider` is an exchange of all ranks; `rank` is this one, for the message."""
        self._provider, self._rank = provider, rank
        self._pass: Iterator[tuple[str, Tensor]] | None = None
        self._is_open = False

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the tensors, one at a time.

        Raises:
            ServiceError: this is no call of all ranks, or its second pass.
        """
        if not self._is_open or self._pass is not None:
            raise self._single_rank_error()
        self._pass = iter(self._provider())
        return self._pass

    def together(self, call: Callable[[], None]) -> None:
        """Make a call that every rank makes now, and all exchanges of one pass, whatever becomes of the call."""
        self._is_open, self._pass = True, None
        try:
            call()
        finally:
            # before the rest of the pass: what the engine asks for from here on is asked on this rank alone
            self._is_open = False
            for _ in self._pass if self._pass is not None else self._provider():
                pass  # what the call left of the pass: the other ranks make these exchanges too

    def _single_rank_error(self) -> ServiceError:
        return ServiceError(
            code="engine.alone",
            what=f"the engine of rank {self._rank} was restarted and needs the full weights, which no rank holds alone",
            where=f"rank {self._rank}, sharded weights (--fsdp, --zero_stage 3)",
            why="all ranks must gather the weights together, and the others are elsewhere in the step",
            state="no rank is left waiting; the run ends with its last checkpoint",
            do="rft-train resume RUN; the reason why the engine ended is in RUN/logs/engine-RANK.log",
        )


class CollectiveLoadEngine:
    """Engine on a `CollectiveWeightProvider`: all ranks load in the same call; every other member is the engine's."""

    def __init__(self, engine: Any, weights: CollectiveWeightProvider) -> None:
        self._engine, self._weights = engine, weights

    def load_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version; all ranks call it."""
        self._weights.together(lambda: self._engine.load_weights(version))

    def refresh(self) -> None:
        """Serve them under the version that it has; all ranks call it."""
        self._weights.together(self._engine.refresh)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
