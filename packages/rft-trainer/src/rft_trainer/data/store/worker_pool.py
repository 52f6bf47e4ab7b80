"""Worker processes that build the shards of a store side by side; which of them builds one changes no byte of it."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from rft_core.child_process import ChildProcess, error_of, wait_for_any
from rft_core.errors import ServiceError
from rft_trainer.data.store.build import BuildShards
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.store.shards import facts_of

_LOOK_SECONDS = 0.2
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""A worker is one core's: threads of its own would take those of the others."""
FEWEST_SHARDS = 8
"""Shards that are worth the start of a process, which takes about two seconds, where nobody asks for workers."""


class NumberedPlan(Protocol):
    """A shard that a worker is asked for: a frozen dataclass that becomes JSON."""

    @property
    def number(self) -> int: ...


Plan = TypeVar("Plan", bound=NumberedPlan)
Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class BuildWorkers:
    """Start of the workers of a build, and their number."""

    command: Sequence[str]
    """Program and arguments; the numbers of the two pipes are added."""
    job: Mapping[str, Any]
    """JSON of which a worker makes what tokenises."""
    num_workers: int
    fewest_shards: int = FEWEST_SHARDS
    """Shards from which on they are started; fewer are built in this process."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_workers(
    directory: Path,
    sources: Sequence[Sequence[Path]],
    workers: BuildWorkers,
    few: BuildShards,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> BuildShards:
    """Return what builds shards in worker processes, and with `few` where there are hardly any.

    Args:
        directory: of the store.
        sources: the files of each source.
        workers: what starts them.
        few: builds in this process.
        stopped: asked several times a second: whether the process was asked to stop.
    """

    first = {"directory": str(directory), "sources": [[str(file) for file in one] for one in sources]}
    return in_processes(first, workers, few, facts_of, lambda number: shard_path(directory, number), stopped=stopped)


def in_processes(
    first: Mapping[str, Any],
    workers: BuildWorkers,
    few: Callable[[Iterator[Plan]], Iterator[Facts]],
    facts_of: Callable[[Mapping[str, Any]], Facts],
    place: Callable[[int], Path],
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> Callable[[Iterator[Plan]], Iterator[Facts]]:
    """Return what builds shards of any kind in worker processes, and with `few` where there are hardly any.

    Args:
        first: JSON that every worker is told once, beside the job.
        workers: what starts them.
        few: builds in this process.
        facts_of: reads the JSON that a worker answers with.
        place: of the shard of a number, for people.
        stopped: asked several times a second: whether the process was asked to stop.
    """

    def build(plans: Iterator[Plan]) -> Iterator[Facts]:
        planned = list(islice(plans, workers.fewest_shards))
        if workers.num_workers < 2 or len(planned) < workers.fewest_shards:
            return few(chain(planned, plans))
        first_line = {**first, "job": dict(workers.job)}
        return _Pool[Plan, Facts](workers, first_line, facts_of, place, stopped).build(chain(planned, plans))

    return build


@dataclass(slots=True)
class _Worker:
    """A process with the shards that it was asked for and has not built yet, oldest first."""

    process: ChildProcess
    asked: deque[int] = field(default_factory=deque[int])


class _Pool(Generic[Plan, Facts]):
    """Workers of one build; every one has a shard before it and one that waits."""

    def __init__(
        self,
        workers: BuildWorkers,
        first: Mapping[str, Any],
        facts_of: Callable[[Mapping[str, Any]], Facts],
        place: Callable[[int], Path],
        stopped: Callable[[], bool],
    ) -> None:
        self._settings, self._first, self._stopped = workers, first, stopped
        self._facts_of, self._place = facts_of, place
        self._workers: list[_Worker] = []
        self._done: dict[int, Facts] = {}
        self._failed: dict[int, Exception] = {}

    def build(self, plans: Iterator[Plan]) -> Iterator[Facts]:
        """Yield the facts of the shards in order; an error is that of the first shard that has one."""
        try:
            self._start()
            waiting: deque[int] = deque()
            while True:
                self._ask(plans, waiting)
                if not waiting:
                    return
                while waiting and waiting[0] in self._done:
                    yield self._done.pop(waiting.popleft())
                # all before it are built: no worker's speed decides which error a person reads
                if waiting and waiting[0] in self._failed:
                    raise self._failed[waiting[0]]
                if self._stopped():
                    raise KeyboardInterrupt
                self._wait()
        finally:
            for worker in self._workers:
                worker.process.kill()

    def _start(self) -> None:
        for _ in range(self._settings.num_workers):
            process = ChildProcess(self._settings.command, _ENVIRONMENT)
            self._workers.append(_Worker(process))
            process.send(json.dumps(self._first).encode())

    def _ask(self, plans: Iterator[Plan], waiting: deque[int]) -> None:
        if self._failed:
            return
        for _ in range(2):
            for worker in self._workers:
                if len(worker.asked) < 2 and (plan := next(plans, None)) is not None:
                    worker.asked.append(plan.number)
                    waiting.append(plan.number)
                    worker.process.send(json.dumps(asdict(cast(Any, plan))).encode())

    def _wait(self) -> None:
        busy = [worker for worker in self._workers if worker.asked]
        if busy:
            wait_for_any([worker.process for worker in busy], _LOOK_SECONDS)
        for worker in busy:
            self._take(worker)

    def _take(self, worker: _Worker) -> None:
        while worker.process.lines:
            reply = json.loads(worker.process.lines.popleft())
            number = worker.asked.popleft()
            if "facts" in reply:
                self._done[number] = self._facts_of(reply["facts"])
                continue
            self._failed[number] = error_of(reply["error"])
            self._give_up(worker, self._failed[number])
        if worker.process.has_ended and worker.asked:
            number = worker.asked[0]
            self._give_up(worker, _ended(worker.process, self._place(number)))

    def _give_up(self, worker: _Worker, error: Exception) -> None:
        """Leave the shards of a worker that has ended unbuilt."""
        while worker.asked:
            self._failed[worker.asked.popleft()] = error


def _ended(process: ChildProcess, shard: Path) -> ServiceError:
    how = process.kill(grace=1.0)
    last = process.last_output.strip().splitlines()
    killed = how.endswith(signal.SIGKILL.name)
    return ServiceError(
        code="store.worker_ended",
        what=f"a worker that built {shard} {how}" + (f": {last[-1]}" if last else ""),
        where=str(shard),
        why="its rows are not in the store",
        state="what is built stays, and the next start goes on from there",
        do="--data_store_workers 1" if not killed else "start again with more memory, or --data_store_workers 1",
    )
