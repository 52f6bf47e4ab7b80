"""Notices of the library, which logs them, as lines of the terminal. No torch is imported here."""

from __future__ import annotations

import logging
import sys

_LIBRARY = ("rft", "rft_core", "rft_algos", "rft_models", "rft_dist", "rft_engine", "rft_trainer")


class _Notices(logging.Handler):
    """Prints a notice: warnings to stderr, others to stdout, whatever these streams are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message alone."""
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(record.getMessage(), file=stream, flush=True)


_NOTICES = _Notices()


def show_notices() -> None:
    """Print what the packages log from now on, once whatever the number of calls."""
    for name in _LIBRARY:
        logger = logging.getLogger(name)
        if _NOTICES not in logger.handlers:
            logger.addHandler(_NOTICES)
            logger.setLevel(logging.INFO)
