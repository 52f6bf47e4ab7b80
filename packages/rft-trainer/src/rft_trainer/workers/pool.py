"""Pool of scoring processes that can be killed: one deadline a job, and a missing answer is never a number.

Each process is started afresh (no fork of this one, no pickle: JSON lines over pipes), leads a
process group of its own and is killed with all its children. A job whose process is killed or
dies gets a status; other jobs are not affected, and another process takes its place.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_core import fault_points
from rft_core.child_process import error_of, wait_for_any
from rft_core.errors import DataError, ServiceError
from rft_core.secrets import scrub_text, without_secrets
from rft_trainer.records.scores import FailureKind, RewardStatus
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.process import ScoringProcess

_SEND = fault_points.declare("reward.send", "a job is about to be handed to a scoring process")

_MAX_FAILED_STARTS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """One call of the task, with its deadline."""

    payload: Mapping[str, object]
    seconds: float
    """Seconds allowed from the moment a process takes the job."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a job: a result with status ok, or the reason why there is none."""

    status: RewardStatus
    result: object = None
    detail: str = ""
    location: str = ""
    """file:line of what was raised, where it is known."""
    failure: str = ""
    """Kind of the failure, where it is finer than the status."""
    traceback: str = ""
    """Of what was raised, from the user's code on."""


class WorkerPool:
    """Pool of up to `num_workers` processes for one task; they start when there is work for them.

    Example::

        with WorkerPool("math", num_workers=2, limits=ProcessLimits(address_bytes=1 << 30)) as pool:
            [outcome] = pool.run([Job({"gold": "1/2", "prediction": "0.5"}, seconds=5.0)])
    """

    def __init__(
        self,
        task: str,
        *,
        num_workers: int,
        limits: ProcessLimits | None = None,
        start_seconds: float = 120.0,
        output: Callable[[bytes], None] | None = None,
    ) -> None:
        """Store the limits; no process is started yet.

        Args:
            task: "math", or "file:PATH:FUNCTION"; see `workers.main`.
            num_workers: processes at work at once.
            limits: of each; None = no limit of memory, and no secrets of the environment.
            start_seconds: time to import what the task needs.
            output: is given what the processes print; None = only the end of it is kept.
        """
        assert num_workers >= 1, f"num_workers must be 1 or more, it is {num_workers}"
        self._task, self._max_processes = task, num_workers
        self._limits, self._start_seconds = limits or ProcessLimits(), start_seconds
        self._output = output
        self.about: Mapping[str, Any] = {}
        """What the task says of itself when it is ready."""
        self._processes: list[ScoringProcess] = []
        self._num_wanted = 0
        self._failed_starts = 0
        self._lock = threading.Lock()
        # also at the end of the interpreter, so that no process outlives a run that was not closed
        self._finalizer = weakref.finalize(self, _kill_all, self._processes)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the processes that run now."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start one process and wait until it is ready.

        Raises:
            OptionsError, DataError: the task cannot be loaded.
            ServiceError: no process can be started.
        """
        with self._lock:
            # one process is enough to find out whether the task loads
            self._want(1)
            while not any(process.is_ready for process in self._processes):
                self._turn()

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run the jobs and return their outcomes, in order; raises as `start` does."""
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            waiting = deque(enumerate(jobs))
            self._want(min(self._max_processes, len(jobs)))
            self._turn(longest=0.0)  # notice who has died since the last call, before a job is given to it
            while len(outcomes) < len(jobs):
                for process in self._processes:
                    if waiting and process.is_ready and process.job_id is None:
                        fault_points.fault_point(_SEND)
                        index, job = waiting.popleft()
                        process.begin(index, job.payload, job.seconds)
                outcomes.update(self._turn())
            return [outcomes[index] for index in range(len(jobs))]

    def close(self) -> None:
        """Kill every process and wait for it; a later `run` would start new ones."""
        with self._lock:
            self._num_wanted = 0
            _kill_all(self._processes)

    def _want(self, num_processes: int) -> None:
        self._num_wanted = max(self._num_wanted, num_processes)
        # all at once: they import beside one another
        while len(self._processes) < self._num_wanted:
            self._processes.append(ScoringProcess(self._task, self._limits, self._start_seconds, self._output))

    def _turn(self, longest: float = math.inf) -> dict[int, Outcome]:
        """Wait until something happens, at most `longest` seconds, then handle it: replies, deaths, deadlines."""
        _wait(self._processes, longest)
        finished: dict[int, Outcome] = {}
        # a copy: processes are taken out of the list below
        for process in list(self._processes):
            for message in process.take_messages():
                finished.update(self._hear(process, message))
            # after its messages: what a process answered before it died still counts
            if process in self._processes and (process.has_ended or process.is_late):
                finished.update(self._bury(process))
        # dead ones are replaced at once, so that the next job need not wait for a start
        self._want(self._num_wanted)
        return finished

    def _hear(self, process: ScoringProcess, message: Mapping[str, Any]) -> dict[int, Outcome]:
        if "refused" in message:
            self._discard(process)
            raise error_of(message["refused"])
        if "error" in message and not process.is_ready:
            self._discard(process)
            raise self._does_not_load(message)
        if message.get("ready"):
            process.become_ready()
            self.about = message
            self._failed_starts = 0
            return {}
        index = process.job_id
        # a late line of a job that is no longer its own
        if index is None or message.get("id") != index:
            return {}
        if "error" in message:
            self._discard(process)
            has_left = bool(message.get("exit"))
            return {
                index: Outcome(
                    RewardStatus.CRASHED if has_left else RewardStatus.FAILED,
                    detail=self._scrubbed(str(message["error"])),
                    location=str(message.get("place", "")),
                    failure=FailureKind.EXIT if has_left else FailureKind.EXCEPTION,
                    traceback=scrub_text(str(message.get("traceback", ""))),
                )
            }
        process.finish()
        # it answered, but has taken more than half of the memory that it may have
        if message.get("last"):
            self._discard(process)
        return {index: Outcome(RewardStatus.OK, result=message.get("result"))}

    def _bury(self, process: ScoringProcess) -> dict[int, Outcome]:
        """Remove a process that has ended or is late, and return the outcome of its job."""
        # read before the kill, after which the process counts as ended either way
        index, seconds, is_late = process.job_id, process.seconds_allowed, not process.has_ended
        how = self._discard(process)
        # a start that fails once may be bad luck (a busy machine); in a row it is the file or the machine
        if not process.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._failed_starts = 0
                raise self._cannot_start(f"was not ready after {seconds:g} s" if is_late else how, process.last_output)
        if index is None:
            return {}
        if is_late:
            return {index: Outcome(RewardStatus.TIMEOUT, detail=f"no answer within {seconds:g} s")}
        last_line = process.last_output.strip().rpartition("\n")[2][:500]
        detail = self._scrubbed(f"the scoring process {how}" + (f"; its last output: {last_line}" if last_line else ""))
        return {index: Outcome(RewardStatus.CRASHED, detail=detail)}

    def _discard(self, process: ScoringProcess) -> str:
        self._processes.remove(process)
        return process.discard()

    def _scrubbed(self, text: str) -> str:
        """Return words of user code without secrets, and the setting that shows it a variable it may miss."""
        hidden = set(os.environ) - set(without_secrets(os.environ, self._limits.variables))
        missed = next((name for name in sorted(hidden) if re.search(rf"\b{re.escape(name)}\b", text)), "")
        flag = "environment" if self._task.startswith("environment:") else "reward"
        hint = f" (hidden from this process as a secret; --{flag}_variables {missed} shows it)" if missed else ""
        return scrub_text(text) + hint

    def _does_not_load(self, message: Mapping[str, Any]) -> DataError:
        is_environment = self._task.startswith("environment:")
        kind, called = ("environment", "class") if is_environment else ("reward", "function")
        return DataError(
            code=f"{kind}.import",
            what=f"{self._task}: {self._scrubbed(str(message['error']))}",
            where=str(message.get("place")),
            why=f"the file of your {kind} runs once from top to bottom before its {called} is called",
            state="no conversation was begun" if is_environment else "no response was scored",
            do=f"correct {message.get('place')}",
        )

    def _cannot_start(self, happened: str, last_output: str) -> ServiceError:
        return ServiceError(
            code="reward.process_start",
            what=f"the scoring process for {self._task} {happened}, {_MAX_FAILED_STARTS} times in a row",
            where=f"its last output: {scrub_text(last_output.strip()[-1000:])!r}",
            why="a reward function is loaded before the first response is scored",
            state="the responses of this step have no reward",
            do="remove from the reward's file what ends or blocks its process while it is imported",
        )


def _wait(processes: Sequence[ScoringProcess], longest: float) -> None:
    """Wait until a pipe can be read or written, the next deadline, or the end of `longest` seconds."""
    deadlines = [process.deadline for process in processes if process.deadline is not None]
    seconds = min([longest, *(max(0.0, deadline - time.monotonic()) for deadline in deadlines)])
    wait_for_any(processes, seconds)


def _kill_all(processes: list[ScoringProcess]) -> None:
    while processes:
        processes.pop().discard()
