"""Files that a run can do without: what the disk refuses of them is said once, counted and passed over."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from rft_core.errors import StorageError

_LOG = logging.getLogger(__name__)


class OptionalFiles:
    """Counts by name what could not be written of sampled rollouts, trackers and the like.

    Metrics and checkpoints are no such files: without them a run ends.
    """

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    @contextmanager
    def tried(self, name: str, number: int = 1) -> Generator[None]:
        """Write `number` rows in the block; where the system refuses, they are lost and the run goes on.

        The next rows are tried again, since a disk may have room again. Only the first refusal is said.
        """
        try:
            yield
        except StorageError as error:
            self._count(name, number, error.problem.what)
        except OSError as error:
            self._count(name, number, str(error))

    def _count(self, name: str, number: int, reason: str) -> None:
        if name not in self.lost:
            self.reasons[name] = reason
            _LOG.warning("%s: %s; the run goes on without these rows", name, reason)
        self.lost[name] += number
