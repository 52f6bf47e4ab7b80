"""Files that survive a kill: lines that are appended whole or not at all, texts that are replaced at once.

JSON records keep every float exactly, and never hold NaN or infinity as a number: such a value is
written as null and its name is listed under "non_finite".
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rft_core.errors import StorageError
from rft_core.fault_points import declare, fault_point

_LOG = logging.getLogger(__name__)
_APPEND = declare("run.append", "before a line is appended to a file of the run directory")
_APPENDED = declare("run.appended", "after a line was written, before it is made durable")
_REPLACE = declare("run.replace", "before a temporary file is written beside the file it will replace")
_RENAME = declare("run.rename", "after a temporary file is durable, before it takes its final name")
_REMOVE = declare("run.remove", "before a file beyond the checkpoint's step is removed")

NON_FINITE = "non_finite"


@contextmanager
def storage_errors(action: str, path: Path) -> Generator[None]:
    """Turn what the operating system refuses into a `StorageError` that names the path and the reason."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        inodes = no_inode_left(path) if error.errno == errno.ENOSPC else None
        why, do = "the run directory must be writable", f"ls -ld {path.parent}"
        if full:
            why, do = "the run directory needs free space", f"df -h {path.parent}"
        if inodes:
            why, do = (
                f"all {inodes:,} inodes of the file system are in use: no file can be made",
                f"df -i {path.parent}",
            )
        raise StorageError(
            code="storage.full" if full else "storage.refused",
            what=f"cannot {action} {path}: {name} ({error.strerror or error})",
            where=str(path),
            why=why,
            state=f"what {path.name} held before is unchanged",
            do=do,
        ) from error


def no_inode_left(path: Path) -> int | None:
    """Return the number of inodes of a file system that has none left while bytes are free; None for any other.

    The system says "no space left" for both. A file system that counts no inodes states 0 of them.
    """
    try:
        status = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
    except OSError:
        return None
    exhausted = status.f_files > 0 and status.f_favail == 0 and status.f_bavail > 0
    return status.f_files if exhausted else None


_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(path: Path) -> str:
    """Return what is at a path, for a message: "a file", "a directory", "a pipe", ..., "not there"."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "not there"
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")


def encode_record(record: Mapping[str, Any]) -> str:
    """One line of JSON without its line end; non-finite numbers become null and are named."""
    names: list[str] = []
    plain = _plain(record, "", names)
    if names:
        plain[NON_FINITE] = names
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which a model can produce, is kept as an escape
        text = json.dumps(plain, allow_nan=False)
    return text


def _plain(value: Any, name: str, names: list[str]) -> Any:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item, f"{name}/{key}" if name else str(key), names) for key, item in entries.items()}
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return [_plain(item, f"{name}/{number}", names) for number, item in enumerate(items)]
    if isinstance(value, float) and not math.isfinite(value):
        names.append(name)
        return None
    return value


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` with a text."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `path` so that a reader or a crash sees the old content or the new one, never a part."""
    # in the same folder, since a rename replaces at once within one file system only
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors("write", path):
        try:
            fault_point(_REPLACE)
            with staged.open("wb") as stream:
                stream.write(data)
                stream.flush()
                # before the rename: after a crash the name must not stand for content that is not on the disk
                os.fsync(stream.fileno())
            fault_point(_RENAME)
            os.replace(staged, path)
        except OSError:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def replace_record(path: Path, record: Mapping[str, Any]) -> None:
    """`replace_text` with one indented JSON record."""
    replace_text(path, json.dumps(json.loads(encode_record(record)), indent=2, ensure_ascii=True) + "\n")


def remove_file(path: Path) -> None:
    """Unlink a file of this run."""
    with storage_errors("remove", path):
        fault_point(_REMOVE)
        path.unlink()


def sync_directory(path: Path) -> None:
    """Put the names that a directory holds on the disk: a name lasts after the `fsync` of its directory alone."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all bytes to an open file, in as many calls as the system needs."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


@contextmanager
def errors_with_path(path: Path) -> Generator[None]:
    """Add the path to errors of `write` and `fsync`, which have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class LineAppender:
    """Appends records to a JSON Lines file; a line that could not be written whole is taken back.

    Args:
        path: the file; made when the first line comes. A torn last line of a killed run is cut off.
        sync_every: fsync after this many lines; 0 leaves that to `sync` and `close`.
    """

    def __init__(self, path: Path, *, sync_every: int = 1) -> None:
        self._path, self._sync_every = path, sync_every
        self._handle: int | None = None
        self._unsynced = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; `StorageError` when the disk refuses, with the file as it was."""
        line = (encode_record(record) + "\n").encode("utf-8")
        with storage_errors("append to", self._path):
            handle = self._open()
            start = os.fstat(handle).st_size
            try:
                fault_point(_APPEND)
                write_all(handle, line)
                fault_point(_APPENDED)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, start)
                raise
            self._unsynced += 1
            if self._sync_every and self._unsynced >= self._sync_every:
                self.sync()

    def sync(self) -> None:
        """Make every appended line durable."""
        if self._handle is not None and self._unsynced:
            with storage_errors("sync", self._path):
                os.fsync(self._handle)
            self._unsynced = 0

    def close(self) -> None:
        """Sync and give the file back; a later `append` opens it again."""
        if self._handle is not None:
            self.sync()
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        if self._handle is not None and not _is_at(self._handle, self._path):
            # what is written to a file without a name is never read again
            _LOG.warning("%s was removed or replaced; its earlier lines are gone, and it is begun anew", self._path)
            os.close(self._handle)
            self._handle, self._unsynced = None, 0
        if self._handle is None:
            is_new = not self._path.exists()
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if is_new:
                sync_directory(self._path.parent)
            else:
                _cut_torn_line(self._handle)
        return self._handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _cut_torn_line(handle: int, block: int = 65536) -> None:
    """Truncate to just after the last line end."""
    # from the end on: the file may be large, and only its last line can be torn
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(handle, end)


@dataclass(frozen=True, slots=True)
class Records:
    """The readable records of a JSON Lines file, and how many lines were not readable."""

    rows: tuple[dict[str, Any], ...]
    num_unreadable: int
    torn: bool
    """Whether the last line has no line end: a kill in the middle of a write, or a live run."""


def read_records(path: Path) -> Records:
    """Records of a file that may belong to a live or to a killed run; empty where there is no file."""
    if not path.exists():
        return Records((), 0, False)
    with storage_errors("read", path):
        raw = path.read_bytes()
    lines = raw.split(b"\n")
    # what follows the last line end is no whole line yet
    rest = lines.pop()
    rows: list[dict[str, Any]] = []
    num_unreadable = 0
    for line in lines:
        record = _decoded(line)
        if record is None:
            num_unreadable += 1
        else:
            rows.append(record)
    return Records(tuple(rows), num_unreadable, bool(rest))


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
