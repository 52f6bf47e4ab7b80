"""The engine's own process: `python -m rft_engine.vllm_worker READ_FD WRITE_FD`.

Reads one JSON request a line and answers it (`engine_process` has the format). Only typed errors
are answered; anything else ends the process, and its owner starts another, because nothing is
known of a vLLM that failed inside.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from rft_algos.errors import RftError
from rft_engine.engine_process import error_fields
from rft_engine.vllm_local import LocalVllm
from rft_engine.vllm_requests import GenerateCall, StepCounts
from rft_engine.vllm_runtime import InstalledVllm, VllmRuntime
from rft_engine.vllm_settings import VllmDeadlines, VllmSettings

_PARENT_CHECK_SECONDS = 1.0


class _Worker:
    def __init__(self, answers: BinaryIO, make_runtime: Callable[[], VllmRuntime]) -> None:
        self._answers, self._make_runtime = answers, make_runtime
        self._engine: LocalVllm | None = None

    def answer(self, request: dict[str, Any]) -> None:
        """Carry one request out."""
        operation = request.pop("do")
        try:
            reply = getattr(self, f"do_{operation}")(**request)
        except RftError as error:
            self._write({"error": error_fields(error)})
            return
        self._write({"reply": reply})

    def do_start(self, settings: dict[str, Any]) -> dict[str, Any]:
        deadlines: Any = VllmDeadlines(**settings.pop("deadlines"))
        known = VllmSettings(**settings, deadlines=deadlines)
        self._engine = LocalVllm(known, self._make_runtime(), in_process=False)
        return asdict(self._engine.facts)

    def do_generate(self, within: float, **fields: Any) -> dict[str, Any]:
        for result in self.engine.generate(GenerateCall(**fields), within):
            if isinstance(result, StepCounts):
                return asdict(result)
            self._write({"item": asdict(result)})
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
    def engine(self) -> LocalVllm:
        assert self._engine is not None, "start comes first"
        return self._engine

    def _write(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()


def serve(read_fd: int, write_fd: int, make_runtime: Callable[[], VllmRuntime]) -> None:
    """Answer until the other side closes its pipe."""
    for descriptor in (read_fd, write_fd):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb") as answers:
        worker = _Worker(answers, make_runtime)
        for line in requests:
            worker.answer(json.loads(line))
    os._exit(0)  # vLLM's threads and children are not waited for


def _end_with(parent: int) -> None:
    """End this process soon after its parent, even in the middle of a rollout."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), InstalledVllm)
