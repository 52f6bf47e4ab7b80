"""Notices of the library, which logs them, as lines of the terminal. No torch is imported here."""

from __future__ import annotations

import logging
import sys

from rft_core.terminal_text import visible

_LIBRARY = "rft"


class _Notices(logging.Handler):
    """Prints a notice: warnings and asides to stderr, others to stdout, whatever these streams are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message alone."""
        # the library marks what must not stand among the results of a command, such as the progress of a download
        aside = record.levelno >= logging.WARNING or getattr(record, "aside", False)
        stream = sys.stderr if aside else sys.stdout
        print(visible(record.getMessage()), file=stream, flush=True)


_NOTICES = _Notices()


def show_notices() -> None:
    """Print what the library logs from now on, once whatever the number of calls.

    Records stop here: the log of a rank gets the printed line, and would have it twice.
    """
    logger = logging.getLogger(_LIBRARY)
    if _NOTICES not in logger.handlers:
        logger.addHandler(_NOTICES)
        logger.setLevel(logging.INFO)
        # the log of a rank gets the printed line, and would have it twice
        logger.propagate = False
