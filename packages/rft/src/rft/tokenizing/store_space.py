"""Disk space of all data stores in a folder: a build that would take more than the settings allow is refused."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

from rft_core.errors import StorageError
from rft_trainer.data.store.build import LOCK, BuildShards
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.shard_plan import ShardPlan
from rft_trainer.data.store.shards import ShardFacts
from rft_trainer.data.token_shards.stream_building import BuildTokens
from rft_trainer.data.token_shards.text_plan import TextShardPlan, TextStream
from rft_trainer.data.token_shards.token_file import TokenShardFacts

GIGABYTE = 10**9
Plan = TypeVar("Plan", bound="_Numbered")
_MOST_NAMED = 3


def within(root: Path, directory: Path, most_gigabytes: int, build: BuildShards) -> BuildShards:
    """Return what builds as `build` does while all stores together take at most so many gigabytes (10^9 bytes).

    Args:
        root: folder of the stores.
        directory: of the store that is built.
        most_gigabytes: that all stores of the folder may take.
        build: builds shards, and yields their facts in order.
    """

    def built(plans: Iterator[ShardPlan]) -> Iterator[ShardFacts]:
        space = _Space(root, directory, most_gigabytes)
        for facts in build(space.planned(plans)):
            space.take()
            yield facts

    return built


def tokens_within(root: Path, most_gigabytes: int, build: BuildTokens) -> BuildTokens:
    """Return what builds the tokens of a stream of texts as `build` does, within the same bound as `within`."""

    def built(directory: Path, stream: TextStream, plans: Iterator[TextShardPlan]) -> Iterator[TokenShardFacts]:
        space = _Space(root, directory, most_gigabytes)
        for facts in build(directory, stream, space.planned(plans)):
            space.take()
            yield facts

    return built


class _Numbered(Protocol):
    """The plan of a shard."""

    @property
    def number(self) -> int: ...


class _Space:
    """Disk space of all stores while one of them is built."""

    def __init__(self, root: Path, directory: Path, most_gigabytes: int) -> None:
        self._root, self._directory, self._most = root, directory, most_gigabytes
        self._taken = sum(_size(store) for store in _stores(root))
        self._waiting: deque[int] = deque()

    def planned(self, plans: Iterator[Plan]) -> Iterator[Plan]:
        """Yield the plans while there is room."""
        for plan in plans:
            self._refuse_more()
            self._waiting.append(plan.number)
            yield plan

    def take(self) -> None:
        """Count the next shard, which is built; those that are planned behind it need room too."""
        self._taken += _size(shard_path(self._directory, self._waiting.popleft()))
        if self._waiting:
            self._refuse_more()

    def _refuse_more(self) -> None:
        if self._taken > self._most * GIGABYTE:
            raise _full(self._root, self._directory, self._taken, self._most)


def _stores(root: Path) -> list[Path]:
    return [store for store in root.iterdir() if (store / LOCK).exists()]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _full(root: Path, directory: Path, taken: int, most_gigabytes: int) -> StorageError:
    others = sorted((store for store in _stores(root) if store != directory), key=_last_used)
    named = [
        f"{store.name} {_size(store) / GIGABYTE:.1f} GB, last used {datetime.fromtimestamp(_last_used(store), UTC):%F}"
        for store in others[:_MOST_NAMED]
    ]
    return StorageError(
        code="store.space",
        what=f"the data stores in {root} take {taken / GIGABYTE:.1f} GB, and data_store_max_gb is {most_gigabytes}",
        where=str(directory),
        why="a store stays until it is removed"
        + (f"; those that were used longest ago are {'; '.join(named)}" if named else ""),
        state=f"{directory} has the shards that are built; the next start goes on behind them",
        do=f"rm -r {shlex.quote(str(others[0]))}" if others else f"--data_store_max_gb {taken * 2 // GIGABYTE + 1}",
    )


def _last_used(store: Path) -> float:
    """Return the time of the last start that opened the store."""
    return (store / LOCK).stat().st_mtime
