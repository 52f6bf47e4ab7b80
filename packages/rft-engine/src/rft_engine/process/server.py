"""Server side of `process.client`: a child that holds one engine and answers one request a line.

Only typed errors are answered; anything else ends the process, and its owner starts another,
because the state of an engine that failed inside is unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rft_core.child_process import ParentPipes, error_fields
from rft_core.errors import RftError
from rft_core.exact_records import exact_line, value_of_line
from rft_engine.engine_base import EngineFacts
from rft_engine.process.requests import GenerateCall, SampleResult, StepCounts
from rft_engine.weight_sync.weight_file import remove_all_leftovers

_PARENT_CHECK_SECONDS = 1.0
_LONGEST_END_SECONDS, _END_CHECK_SECONDS = 0.2, 0.01


class LocalEngine(Protocol):
    """A started engine in the child."""

    facts: EngineFacts

    def generate(self, call: GenerateCall, seconds: float) -> Iterator[SampleResult | StepCounts]: ...

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]: ...

    def serve(self, version: int) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self, tags: list[str]) -> None: ...


class RequestWorker:
    """Worker that answers each request `x` with its method `do_x`."""

    def __init__(self, pipes: ParentPipes) -> None:
        self._pipes = pipes

    def answer(self, request: dict[str, Any]) -> None:
        """Carry one request out and write its reply, or the typed error that it raised."""
        operation = request.pop("do")
        try:
            reply = getattr(self, f"do_{operation}")(**request)
        # a typed error leaves the engine in a known state, so the process lives on; any other one ends it
        except RftError as error:
            self._write({"error": error_fields(error)})
            return
        self._write({"reply": reply})

    def _write(self, message: dict[str, Any]) -> None:
        self._pipes.send(exact_line(message))


class EngineWorker(RequestWorker):
    """Answers requests with the engine that its first request starts."""

    def __init__(self, pipes: ParentPipes, make_engine: Callable[[dict[str, Any]], LocalEngine]) -> None:
        super().__init__(pipes)
        self._make_engine = make_engine
        self._engine: LocalEngine | None = None

    def do_start(self, settings: dict[str, Any]) -> dict[str, Any]:
        self._engine = self._make_engine(settings)
        return asdict(self._engine.facts)

    def do_generate(self, within: float, **fields: Any) -> dict[str, Any]:
        for result in self.engine.generate(GenerateCall(**fields), within):
            if isinstance(result, StepCounts):
                return asdict(result)
            self._write({"item": result})
        raise AssertionError("a generate call ends with its counts")

    def do_rpc(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        return self.engine.rpc(method, arguments)

    def do_serve(self, version: int) -> None:
        self.engine.serve(version)

    def do_sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def do_wake(self, tags: list[str]) -> None:
        self.engine.wake(tags)

    @property
    def engine(self) -> LocalEngine:
        assert self._engine is not None, "start comes first"
        return self._engine


def serve(read_fd: int, write_fd: int, make_engine: Callable[[dict[str, Any]], LocalEngine]) -> None:
    """Answer until the other side closes its pipe."""
    serve_with(read_fd, write_fd, lambda pipes: EngineWorker(pipes, make_engine))


def serve_with(read_fd: int, write_fd: int, make_worker: Callable[[ParentPipes], RequestWorker]) -> None:
    """`serve` with a worker of another kind."""
    pipes = ParentPipes(read_fd, write_fd)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    worker = make_worker(pipes)
    for line in pipes.requests:
        worker.answer(value_of_line(line.removesuffix(b"\n")))
    # its pipes close a moment before it is gone; the other thread looks less often
    until = time.monotonic() + _LONGEST_END_SECONDS
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(_END_CHECK_SECONDS)
    remove_all_leftovers()
    os._exit(0)  # the engine's threads and children are not waited for


def _end_with(parent: int) -> None:
    """End this process soon after its parent, even in the middle of a rollout."""
    # a process whose parent has ended gets another one
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    # a parent that was killed could not give its shared memory back
    remove_all_leftovers()
    os._exit(1)
