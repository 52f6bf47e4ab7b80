"""Every operation that a checkpoint performs on the disk, each between two fault points.

Durability rests on three facts of POSIX file systems: the data of a file are on the disk after
its `fsync`, a name is on the disk after the `fsync` of its directory, and `rename` replaces one
name by another as a whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rft_core import durable_files
from rft_core.durable_files import errors_with_path, write_all
from rft_core.fault_points import Operation

BLOCK_BYTES = 2**20
"""Each block of this size has its own CRC-32 in the manifest, so that damage is located."""

_CHUNK_BYTES = 8 * BLOCK_BYTES


def _operation(name: str, meaning: str) -> Operation:
    return Operation(f"checkpoint.{name}", meaning)


SPACE = _operation("space", "look at the free space")
STAGE = _operation("mkdir", "create the folder, a staging directory or one inside it")
FILE_OPEN = _operation("file.open", "create a file")
FILE_WRITE = _operation("file.write", "write a piece of a file")
FILE_SYNC = _operation("file.sync", "flush a file to the disk")
DIRECTORY_SYNC = _operation("directory.sync", "flush the names in a directory to the disk")
MODEL_WRITE = _operation("model.write", "let the model write its directory")
DISPLACE = _operation("displace", "move an earlier checkpoint of the same step aside")
PUBLISH = _operation("publish", "rename the staging directory to its final name")
VERIFY = _operation("verify", "read the published checkpoint back")
RESTORE = _operation("restore", "give a displaced checkpoint its name back")
QUARANTINE = _operation("quarantine", "move a damaged checkpoint aside")
RETIRE = _operation("retire", "rename a checkpoint that is to be removed")
UNLINK = _operation("unlink", "remove a file of a retired or staged directory")
REMOVE_DIRECTORY = _operation("rmdir", "remove an emptied directory")


@dataclass(frozen=True, slots=True)
class Digest:
    """Size and hashes of a file's content."""

    size: int
    sha256: str
    """Hexadecimal, over the whole file, as `sha256sum` gives it."""
    crc32_blocks: tuple[int, ...]
    """CRC-32 of each block of `BLOCK_BYTES`, the last one shorter."""


class _Hasher:
    """Digest of a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._blocks: list[int] = []
        self._crc = 0
        self._size = 0

    def update(self, piece: memoryview) -> None:
        self._sha256.update(piece)
        while len(piece):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            part = piece[:room]
            self._crc = zlib.crc32(part, self._crc)
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._blocks.append(self._crc)
                self._crc = 0
            piece = piece[room:]

    def digest(self) -> Digest:
        tail = (self._crc,) if self._size % BLOCK_BYTES else ()
        return Digest(self._size, self._sha256.hexdigest(), (*self._blocks, *tail))


def create_directory(path: Path) -> None:
    """Create one directory, between fault points."""
    with STAGE:
        path.mkdir()


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Digest:
    """Create `path` with the pieces one after another, hashed on the way, flushed to the disk."""
    hasher = _Hasher()
    # O_EXCL: nothing that exists is written over, and no link is written through
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with errors_with_path(path):
        with FILE_OPEN:
            descriptor = os.open(path, flags, 0o666)
        try:
            for piece in pieces:
                for chunk in _chunks(memoryview(piece)):
                    with FILE_WRITE:
                        write_all(descriptor, chunk)
                    hasher.update(chunk)
            with FILE_SYNC:
                os.fsync(descriptor)
            _forget_cached(descriptor)
        finally:
            os.close(descriptor)
    return hasher.digest()


def digest_file(path: Path, *, sync: bool = False) -> Digest:
    """Read a regular file and hash it; with `sync`, flush it to the disk afterwards.

    Symbolic links and everything else that is no regular file raise OSError.
    """
    hasher = _Hasher()
    with errors_with_path(path):
        # O_NONBLOCK, since opening a pipe would wait for somebody who writes to it
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            while piece := os.read(descriptor, _CHUNK_BYTES):
                hasher.update(memoryview(piece))
            if sync:
                with FILE_SYNC:
                    os.fsync(descriptor)
                _forget_cached(descriptor)
        finally:
            os.close(descriptor)
    return hasher.digest()


def sync_directory(path: Path) -> None:
    """Put the names that `path` holds on the disk."""
    with errors_with_path(path), DIRECTORY_SYNC:
        durable_files.sync_directory(path)


def rename(operation: Operation, source: Path, target: Path) -> None:
    """Give `source` the name `target`, which must be free, and put the change on the disk."""
    with operation:
        if os.path.lexists(target):  # rename would replace an empty directory without a word
            raise FileExistsError(errno.EEXIST, "a rename would replace it", str(target))
        source.rename(target)
    sync_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory with everything in it; links are removed, never followed."""
    with os.scandir(path) as entries:
        # in a fixed order, so that a fault at the n-th operation meets the same file every time
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            with UNLINK:
                os.unlink(entry.path)
    with REMOVE_DIRECTORY:
        path.rmdir()


def _chunks(view: memoryview) -> Iterable[memoryview]:
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def _forget_cached(descriptor: int) -> None:
    # What is read back after publishing should come from the disk, not from the page cache.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
