"""A file layer that keeps what a disk would hold after a power loss: what was synced, and nothing else.

It sees the order of `fsync`, `rename` and `unlink`. A file has on the disk the bytes that it had when it was last
synced, and none before; a directory has the names that it had when it was last synced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Key = tuple[int, int]
"""Inode, and how many files had it before: the system gives the number of a removed file to another one."""


@dataclass(frozen=True, slots=True)
class Event:
    """One operation that orders what reaches the disk."""

    kind: str
    """"sync", "rename" or "unlink"."""
    path: Path
    """Of a rename: the new name."""
    unsynced: tuple[str, ...] = ()
    """Of a rename: what the new name shows and the disk does not hold yet, a part of its path."""


@dataclass(slots=True)
class DurableDisk:
    """What the disk holds; `events` are in order, `after` is called behind each."""

    events: list[Event] = field(default_factory=list)
    after: Callable[[Event], object] | None = None
    _contents: dict[Key, bytes] = field(default_factory=dict)
    _names: dict[Key, dict[str, tuple[Key, bool]]] = field(default_factory=dict)
    _removed: dict[int, int] = field(default_factory=dict)

    def install(self, patches: pytest.MonkeyPatch) -> None:
        """Look on at the operations of this process from now on; what exists already counts as not synced."""
        fsync, unlink, rmdir = os.fsync, os.unlink, os.rmdir

        def seen_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self._sync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        def remover(remove: Callable[..., None]) -> Callable[..., None]:
            def seen(path: Any, **options: Any) -> None:
                inode = os.lstat(path, **options).st_ino
                remove(path, **options)
                self._removed[inode] = self._removed.get(inode, 0) + 1
                self._tell(Event("unlink", Path(path)))

            return seen

        def renamer(rename: Callable[..., None]) -> Callable[..., None]:
            def seen(source: Any, target: Any, **options: Any) -> None:
                unsynced = tuple(self._unsynced(Path(source), ""))
                replaced = os.lstat(target).st_ino if os.path.lexists(target) else None
                rename(source, target, **options)
                if replaced is not None:
                    self._removed[replaced] = self._removed.get(replaced, 0) + 1
                self._tell(Event("rename", Path(target), unsynced))

            return seen

        patches.setattr(os, "fsync", seen_fsync)
        patches.setattr(os, "unlink", remover(unlink))
        patches.setattr(os, "rmdir", remover(rmdir))
        for name in ("rename", "replace"):
            patches.setattr(os, name, renamer(getattr(os, name)))

    def sync_all(self, directory: Path) -> None:
        """Take all that a directory holds now as being on the disk."""
        for folder, _, files in os.walk(directory):
            for name in files:
                self._store(Path(folder, name))
            self._store(Path(folder))

    def copy_to(self, source: Path, target: Path) -> Path:
        """Write at `target` what the disk holds of the directory `source`, as after a power loss now."""
        self._copy(self._key(source), target)
        return target

    def contents(self, file: Path) -> bytes:
        """Return the bytes of a file that the disk holds; FileNotFoundError where the disk lacks its name."""
        entry = self._names.get(self._key(file.parent), {}).get(file.name)
        if entry is None:
            raise FileNotFoundError(file)
        return self._contents.get(entry[0], b"")

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if self.after is not None:
            self.after(event)

    def _sync(self, path: Path) -> None:
        self._store(path)
        self._tell(Event("sync", path))

    def _store(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._key(path)] = self._listing(path)
        else:
            self._contents[self._key(path)] = path.read_bytes()

    def _key(self, path: Path) -> Key:
        inode = path.lstat().st_ino
        return inode, self._removed.get(inode, 0)

    def _listing(self, path: Path) -> dict[str, tuple[Key, bool]]:
        return {entry.name: (self._key(entry), stat.S_ISDIR(entry.lstat().st_mode)) for entry in path.iterdir()}

    def _unsynced(self, path: Path, shown: str) -> list[str]:
        if not path.is_dir():
            return [] if self._contents.get(self._key(path)) == path.read_bytes() else [shown or path.name]
        found = [] if self._names.get(self._key(path)) == self._listing(path) else [f"{shown}/"]
        for entry in sorted(path.iterdir()):
            found += self._unsynced(entry, f"{shown}/{entry.name}" if shown else entry.name)
        return found

    def _copy(self, key: Key, target: Path) -> None:
        target.mkdir(parents=True)
        for name, (child, is_directory) in self._names.get(key, {}).items():
            if is_directory:
                self._copy(child, target / name)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))
