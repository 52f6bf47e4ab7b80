"""Reports of failed rewards: the first of each kind with its traceback, since the others would say the same."""

from __future__ import annotations

import logging
from pathlib import Path

from rft_trainer.records.scores import Score

_LOG = logging.getLogger(__name__)
_MOST_REPORTS = 10


class FailureReports:
    """Reports of a reward function to the log of the program, one for each kind of failure and place."""

    def __init__(self, name: str, log: Path | None = None) -> None:
        """Store the function's name, and the file with what it prints."""
        self._name, self._log = name, log
        self._seen: set[tuple[str, str]] = set()

    def report(self, score: Score, *, place: str = "", traceback: str = "") -> None:
        """Log a score that is missing, unless one of its kind and place was logged before."""
        # a kind with no place is one by itself: a message may quote what was scored
        key = (score.failure or str(score.status), place)
        if key in self._seen or len(self._seen) >= _MOST_REPORTS:
            return
        self._seen.add(key)
        where = f"; output and tracebacks: {self._log}" if self._log is not None else ""
        text = f"the reward {self._name} gave no score ({key[0]}): {score.detail}{where}"
        _LOG.warning("%s", f"{text}\n{traceback}" if traceback else text)
