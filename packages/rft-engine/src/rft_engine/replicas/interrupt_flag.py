"""Interrupt flag: eight bytes of shared memory by which one process ends a call of another between two steps.

The caller writes the number of the call that is to end; a call looks whether its own number is reached.
A number that comes too late, for a call that has ended by itself, means nothing to the next one.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path

from rft_engine.weight_sync.weight_file import shared_directory

_BYTES = 8


class InterruptFlag:
    """One side's view of the number; `create` makes the file, which may be unlinked once both have mapped it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)

    @classmethod
    def create(cls) -> InterruptFlag:
        """A new file, in shared memory where there is some; its number is 0."""
        descriptor, name = tempfile.mkstemp(prefix="rft-interrupt-", dir=shared_directory(_BYTES))
        # an empty file cannot be mapped
        os.write(descriptor, bytes(_BYTES))
        os.close(descriptor)
        return cls(name)

    def set(self, call: int) -> None:
        """End this call, and any before it."""
        self._memory[:] = struct.pack("<q", call)

    def reached(self, call: int) -> bool:
        """Return True when this call must end."""
        return struct.unpack("<q", self._memory[:])[0] >= call

    def unlink(self) -> None:
        """Take the name away; the memory stays with those who have mapped it."""
        self.path.unlink(missing_ok=True)
