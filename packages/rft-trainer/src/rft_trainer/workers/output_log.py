"""Log of what processes of user code print, with a limit on its size."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_BYTES = 8 << 20
"""Bytes of a file; when it is full it becomes FILE.1, in the place of an earlier one, and a new one begins."""


class OutputLog:
    """File to which output is appended, made with the first of it.

    A run goes on without it: what cannot be written is dropped.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def write(self, output: bytes) -> None:
        """Append output; the file before it is kept, older ones are not."""
        with contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size + len(output) > self._max_bytes:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            with self.path.open("ab") as file:
                file.write(output[-self._max_bytes :])
