"""States that a disk may hold after a power loss: of what was not synced any part, in any order.

POSIX orders nothing but by `fsync`. A file that changed since its last one may hold its earlier bytes, its later ones,
a beginning of these, or zeros in their place. Of the names that a directory gained or lost since its last one any may
have reached the disk and any may not; a rename reached it as a whole or not at all.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest


@dataclass(eq=False, slots=True)
class Node:
    """A file or a directory, whatever names it has."""

    is_directory: bool
    synced: bytes = b""
    """What a file had at its last sync."""


Name = tuple[Node, str]
Names = dict[Name, Node]
"""What stands under which name of which directory."""


@dataclass(frozen=True, slots=True)
class Change:
    """One operation on names: `old` is lost, `new` is gained."""

    node: Node
    old: Name | None
    new: Name | None

    def apply(self, names: Names) -> None:
        """Do it where its turn comes; an old name that is not there, or is another's, stays as it is."""
        if self.old is not None and names.get(self.old) is self.node:
            del names[self.old]
        if self.new is not None:
            names[self.new] = self.node


@dataclass(frozen=True, slots=True)
class State:
    """What the disk holds in one state."""

    root: Node
    names: Names
    contents: dict[Node, bytes]

    def write(self, target: Path) -> Path:
        """Make the directory `target` as it is found when there is power again."""
        listing: dict[Node, list[tuple[str, Node]]] = {}
        for (folder, name), node in self.names.items():
            listing.setdefault(folder, []).append((name, node))

        def copy(folder: Node, path: Path) -> None:
            path.mkdir(parents=True)
            for name, node in listing.get(folder, ()):
                if node.is_directory:
                    copy(node, path / name)
                else:
                    (path / name).write_bytes(self.contents.get(node, b""))

        copy(self.root, target)
        return target


@dataclass(frozen=True, slots=True)
class Instant:
    """What a power loss needs to know of one instant."""

    before: str
    """The operation that was about to be done."""
    acknowledged: Any
    """`PowerLoss.acknowledged` at this instant."""
    root: Node
    synced: Names
    pending: tuple[Change, ...]
    contents: dict[Node, tuple[bytes, ...]]
    """What each file may hold; a single entry where it is synced."""

    @property
    def num_states(self) -> int:
        """In how many ways a part can have reached the disk."""
        return 2 ** len(self.pending) * prod(map(len, self.contents.values()))

    def states(self, most: int, drawn: random.Random) -> Iterator[State]:
        """Give all states where there are at most so many; else that with nothing, that with all, and drawn ones."""
        open_files = [node for node, held in self.contents.items() if len(held) > 1]
        sizes = [2] * len(self.pending) + [len(self.contents[node]) for node in open_files]
        for choice in _choices(sizes, most, drawn):
            names = dict(self.synced)
            for change, is_done in zip(self.pending, choice, strict=False):
                if is_done:
                    change.apply(names)
            contents = {node: held[0] for node, held in self.contents.items()}
            for node, number in zip(open_files, choice[len(self.pending) :], strict=True):
                contents[node] = self.contents[node][number]
            yield State(self.root, names, contents)


def _choices(sizes: Sequence[int], most: int, drawn: random.Random) -> Iterator[Sequence[int]]:
    if prod(sizes) <= most:
        yield from product(*map(range, sizes))
        return
    yield [0] * len(sizes)
    yield [size - 1 for size in sizes]
    for _ in range(most - 2):
        # from nearly nothing to nearly all: evenly drawn, a whole group of operations would hardly ever be absent
        share = drawn.random()
        yield [drawn.randrange(1, size) if drawn.random() < share else 0 for size in sizes]


@dataclass(slots=True)
class PowerLoss:
    """Looks on at the operations of this process below `root`, and notes the instant before each that orders others.

    What is there when it is made counts as being on the disk.
    """

    root: Path
    acknowledged: Any = None
    """What the user of the directory relies on from now on; set by the test."""
    instants: list[Instant] = field(default_factory=list)
    _nodes: dict[int, Node] = field(default_factory=dict)
    """By inode, of what exists: the system gives the number of a removed file to another one."""
    _now: Names = field(default_factory=dict)
    _synced: Names = field(default_factory=dict)
    _pending: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now = self._look()
        self._synced = dict(self._now)
        for path in self.root.rglob("*"):
            if path.is_file():
                self._node(path).synced = path.read_bytes()

    def install(self, patches: pytest.MonkeyPatch) -> None:
        """Begin to look on."""
        fsync = os.fsync

        def seen_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not path.is_relative_to(self.root):
                return fsync(descriptor)
            self.note(f"sync of {path.relative_to(self.root)}")
            fsync(descriptor)
            return self._sync(path)

        def seen_change(change: Callable[..., None], word: str) -> Callable[..., None]:
            def seen(path: Any, *target: Any, **options: Any) -> None:
                if not Path(path).is_relative_to(self.root):
                    return change(path, *target, **options)
                self.note(f"{word} of {Path(path).relative_to(self.root)}")
                node, old = self._node(Path(path)), self._name(Path(path))
                new = self._name(Path(target[0])) if target else None
                # an inode that goes gives its number to the next file
                gone = Path(target[0] if target else path)
                number = gone.lstat().st_ino if os.path.lexists(gone) else None
                change(path, *target, **options)
                if number is not None:
                    self._nodes.pop(number, None)
                self._change(Change(node, old, new))
                return None

            return seen

        patches.setattr(os, "fsync", seen_fsync)
        for name in ("unlink", "rmdir", "rename", "replace"):
            patches.setattr(os, name, seen_change(getattr(os, name), name))

    def note(self, before: str) -> None:
        """Note what a power loss now may leave."""
        names = self._look()
        # between two operations that order others, files and directories are made, and no name is lost
        for name, node in names.items():
            if self._now.get(name) is not node:
                self._pending.append(Change(node, None, name))
        self._now = names
        now = {self._node(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        removed = {change.node for change in self._pending} | set(self._synced.values())
        contents = {node: (node.synced,) for node in removed if not node.is_directory}
        contents |= {node: _partial(node.synced, content) for node, content in now.items()}
        root = self._node(self.root)
        pending = tuple(self._pending)
        self.instants.append(Instant(before, self.acknowledged, root, dict(self._synced), pending, contents))

    def states(self, seed: int, most: int) -> Iterator[tuple[Instant, State]]:
        """Give about `most` states of all instants, the same for the same seed."""
        share = max(2, most // max(1, len(self.instants)))
        for number, instant in enumerate(self.instants):
            for state in instant.states(share, random.Random(f"{seed}:{number}")):
                yield instant, state

    def _change(self, change: Change) -> None:
        self._pending.append(change)
        change.apply(self._now)

    def _sync(self, path: Path) -> None:
        node = self._node(path)
        if not node.is_directory:
            node.synced = path.read_bytes()
            return
        settled = [
            change for change in self._pending if node in (side and side[0] for side in (change.old, change.new))
        ]
        for change in settled:
            change.apply(self._synced)
        self._pending = [change for change in self._pending if change not in settled]

    def _look(self) -> Names:
        """Return all names below the root."""
        return {self._name(path): self._node(path) for path in sorted(self.root.rglob("*"))}

    def _name(self, path: Path) -> Name:
        return self._node(path.parent), path.name

    def _node(self, path: Path) -> Node:
        found = path.lstat()
        return self._nodes.setdefault(found.st_ino, Node(stat.S_ISDIR(found.st_mode)))


def _partial(synced: bytes, now: bytes) -> tuple[bytes, ...]:
    """Return what a file may hold that had `synced` at its last sync and has `now`."""
    found = (synced, now[: len(now) // 2], bytes(len(now)), now)
    return tuple(dict.fromkeys(found)) if synced != now else (now,)
