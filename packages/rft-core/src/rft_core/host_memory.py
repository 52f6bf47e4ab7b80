"""Memory of the host: what this process holds, and what it may still take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def resident_memory() -> int | None:
    """Return the bytes of this process that are in memory now; None where the system does not tell it (no Linux)."""
    words = _lines(Path("/proc/self/statm"))
    return int(words[0].split()[1]) * resource.getpagesize() if words else None


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Return MemAvailable of Linux or the room left in the control groups, the smaller; None on another system.

    Args:
        root: of the file system, for tests.
    """
    rooms = [room for room in (_available(root), *_group_rooms(root)) if room is not None]
    return max(min(rooms), 0) if rooms else None


def total_host_memory(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or the limit of a control group of this process where that is less, in bytes.

    Args:
        root: of the file system of the control groups, for tests.
    """
    limits = [_number(group / names[0]) for group, names in _groups(root)]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit in limits if limit is not None)])


def _available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_rooms(root: Path) -> Iterator[int | None]:
    """Limit less use of every group that this process is in, pages of files that can be dropped not counted as used."""
    return (_room(group, *names) for group, names in _groups(root))


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every group that this process is in, with its files of the limit and of what is used, and a line of its stat."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
    names[2] = ("memory.max", "memory.current", "inactive_file")
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # the line of a version 2 group names no controllers
        version = 1 if controllers else 2
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        inner = Path(path.strip("/"))
        # the limit of any group above holds for this process too
        for group in (inner, *inner.parents):
            yield top / group, names[version]


def _room(group: Path, limit: str, usage: str, droppable: str) -> int | None:
    max_bytes, used = _number(group / limit), _number(group / usage)
    if max_bytes is None or used is None:
        return None
    dropped = next((int(line.split()[1]) for line in _lines(group / "memory.stat") if line.split()[0] == droppable), 0)
    return max_bytes - used + dropped


def _number(path: Path) -> int | None:
    words = _lines(path)
    return int(words[0]) if words and words[0].strip().isdigit() else None  # "max" = no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
