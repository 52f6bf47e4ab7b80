"""A file of JSON lines that grows: each look at it gives the lines that are new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from rft_trainer.runs.reader import parse_record

Row = dict[str, Any]
MOST_BYTES = 16 << 20
"""Read by one look; the rest is read by the next ones."""
_MARK_BYTES = 256


class GrowingRows:
    """Reader of one file. A resumed run cuts its rows back, and then the reader begins anew.

    Example::

        reader = GrowingRows(run / "metrics.jsonl")
        reader.new_rows()                           # all of them
        reader.new_rows()                           # [] until the run writes
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.generation = 0
        """How often the reader began anew: the rows of an earlier generation are no longer those of the file."""
        self.is_behind = False
        """Whether the last look left lines that are there."""
        self._most_bytes = most_bytes
        self._offset = 0
        self._mark = b""
        """The last bytes before the offset: where others stand there, the file is another one."""

    def new_rows(self) -> list[Row]:
        """Return the whole lines behind those of the last look that are records; none where the file is gone."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:
            if self._offset:
                self._begin_anew()
            self.is_behind = False
            return []

    def _read(self, file: BinaryIO) -> list[Row]:
        size = os.fstat(file.fileno()).st_size
        if self._is_other(file, size):
            self._begin_anew()
        file.seek(self._offset)
        data = file.read(self._most_bytes)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == self._most_bytes:
            end = len(data)  # a line that is longer than a look is passed over
        self._offset += end
        self._mark = (self._mark + data[max(0, end - _MARK_BYTES) : end])[-_MARK_BYTES:]
        self.is_behind = len(data) == self._most_bytes
        lines = data[:end].decode("utf-8", errors="replace").split("\n")
        return [row for line in lines if (row := parse_record(line))]

    def _is_other(self, file: BinaryIO, size: int) -> bool:
        if size < self._offset:
            return True
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) != self._mark

    def _begin_anew(self) -> None:
        self.generation += 1
        self._offset, self._mark = 0, b""


def last_rows(path: Path, most_bytes: int) -> list[Row]:
    """Return the records at the end of a file of JSON lines, as many as stand whole in its last bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - most_bytes)
            file.seek(start)
            data = file.read(most_bytes)
    except OSError:
        return []
    begin = data.find(b"\n") + 1 if start else 0
    lines = data[begin : data.rfind(b"\n") + 1].decode("utf-8", errors="replace").split("\n")
    return [row for line in lines if (row := parse_record(line))]
