"""Error files in the run's folder: error.json, and the page in logs/; a failed write never ends the run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from rft_core.errors import RftError
from rft_dist.health.failure import Cause

_LOG = logging.getLogger(__name__)

ERROR_FILE = "error.json"
PAGE_FILE = "stopped.txt"


def _show(error: RftError) -> None:
    _LOG.error("error  %s", error)


class RunFolder:
    """The folder once it is known; without one, nothing is written."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.resume_command = "resume from the last checkpoint"
        self.show: Callable[[RftError], None] = _show
        """How the last error of a process that is ended from outside of its main thread is told."""

    def attach(self, path: Path, resume_command: str) -> None:
        """Set the run's folder and its resume command."""
        self.path, self.resume_command = path, resume_command

    def clear(self) -> None:
        """Remove the error files of an earlier part of the run."""
        if self.path is not None:
            for name in (ERROR_FILE, f"logs/{PAGE_FILE}"):
                (self.path / name).unlink(missing_ok=True)

    def write_error(self, cause: Cause) -> None:
        """Write error.json, unless another rank was first."""
        if self.path is None or not self.path.is_dir():
            return
        text = json.dumps(json.loads(cause.encode()) | {"unix_time": time.time()}, indent=2, ensure_ascii=False)
        try:
            # O_EXCL: of all ranks that fail at about the same time, the first one's cause stays
            handle = os.open(self.path / ERROR_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return  # another rank was first, or the disk is what failed

    def write_page(self, text: str) -> None:
        """Write logs/stopped.txt; the pages of all ranks name the same cause."""
        if self.path is None or not (self.path / "logs").is_dir():
            return
        try:
            (self.path / "logs" / PAGE_FILE).write_text(text, encoding="utf-8")
        except OSError:
            return

    def last_words(self, error: RftError) -> None:
        """Show the error of this process from the thread that ends it; a stream that is closed is ignored."""
        try:
            self.show(error)
        except (OSError, ValueError):
            return
