"""Log of one rank (logs/rank_N.log): its printed lines, and its log records from INFO on.

The run's folder is known late, and made later still, by rank 0: until then the lines are kept in memory.
What libraries in C++ write past Python (NCCL_DEBUG) is not in it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, TextIO, cast

from rft_core.terminal_text import visible

_OURS = ("rft", "rft_algos", "rft_cli", "rft_core", "rft_dist", "rft_engine", "rft_models", "rft_trainer")
_KEPT = 2**20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REDRAWN = re.compile(r"\x1b\[[0-9;?]*[A-LSTf-l]")
"""Movements of the cursor: what a live panel draws over itself."""


class RankLog:
    """The log of one rank. `close` writes what is left, also where the run never began."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._waiting: list[str] = []
        self._num_waiting = 0
        self._logs: Path | None = None
        self._file: TextIO | None = None
        self._closed = False

    def attach(self, run: Path) -> None:
        """Set the run's folder; its logs/ may not exist yet."""
        self._logs = run / "logs"
        self.flush()

    def write(self, text: str) -> None:
        """Add text as it was printed; colours are taken out, and what a live panel redraws is left out."""
        # a live panel would fill the log with its redraws
        if _REDRAWN.search(text):
            return
        text = _COLOURS.sub("", text)
        if self._file is not None:
            self._put(text)
        elif not self._closed:
            # bounded, because a run that never begins never has a folder
            if self._num_waiting < _KEPT:
                self._waiting.append(text)
                self._num_waiting += len(text)
            self.flush()

    def flush(self) -> None:
        """Open the file if its folder is there now."""
        if self._file is not None or self._logs is None or not self._logs.is_dir():
            return
        with contextlib.suppress(OSError):  # a log that cannot be written ends no run
            path = self._logs / f"rank_{self._rank}.log"
            # half of a surrogate pair, which a model can produce, is kept as an escape, as stderr does
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._put("".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Close the log; text written later is dropped."""
        self.flush()
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was refused before is in its buffer, and is refused again
                self._file.close()
            self._file = None

    def _put(self, text: str) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)


class Tee:
    """A stream that is also written to the log; in everything else it is the stream."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        """Write text to the stream and to the log."""
        # the stream first: the terminal shows a line whatever becomes of the log
        written = self._stream.write(text)
        self._log.write(text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines to the stream and to the log."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(logging.Handler):
    """Logging handler that writes records into the log, except those that reach it through stderr anyway."""

    def __init__(self, log: RankLog, below: int | None) -> None:
        super().__init__(logging.INFO)
        self._log, self._below = log, below
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line of the log."""
        if self._below is None or record.levelno < self._below:
            self._log.write(self.format(record) + "\n")


class _Visible(logging.Formatter):
    """Formatter for a terminal: a message may quote what others wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextlib.contextmanager
def logged(rank: int, header: str) -> Generator[RankLog]:
    """While the block runs, what is printed and logged goes into the log as well; it starts with `header`."""
    log = RankLog(rank)
    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {header}\n")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", Tee(stream, log)) for stream in before)
    try:
        with _logging_into(log):
            yield log
    finally:
        sys.stdout, sys.stderr = before
        log.close()


@contextlib.contextmanager
def _logging_into(log: RankLog) -> Generator[None]:
    """Add a handler to the root logger; where there was none, warnings still reach stderr as before."""
    root = logging.getLogger()
    # a handler on the root silences logging's last resort, so warnings need one of their own
    alone = not root.handlers
    handlers: list[logging.Handler] = [_Handler(log, logging.WARNING if alone else None)]
    if alone:
        to_stderr = logging.StreamHandler()
        to_stderr.setLevel(logging.WARNING)
        to_stderr.setFormatter(_Visible())
        handlers.append(to_stderr)
    # INFO for our loggers only: libraries keep the level that they have
    loggers = [logging.getLogger(name) for name in _OURS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if logger.level == logging.NOTSET else logger.level)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
