"""The cache of the user: files and directories that are made from objects and settings, each named after a hash."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rft_core.durable_files import storage_errors


def cache_directory() -> Path:
    """Return the directory of files that are made from objects: `RFT_CACHE`, else `~/.cache/rft`."""
    chosen = os.environ.get("RFT_CACHE", "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "rft"


def written_once(room: str, content: object, write: Callable[[Path], object]) -> Path:
    """Return the directory named after the hash of `content`; where it is not there, `write` makes it.

    Processes of one machine that ask for it at once wait for the first of them.
    """
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    target = cache_directory() / room / digest
    if target.is_dir():
        return target
    with storage_errors("write", target), _locked(target.with_name(f".{digest}.lock")):
        staging = target.with_name(f".{digest}-{os.getpid()}")
        try:
            if not target.is_dir():
                write(staging)
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock of a file; it is free again when its holder has ended, in whatever way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
