"""Main program of a scoring process: reads one JSON line a request, writes one JSON line a reply.

Started by `pool.WorkerPool` as `python -P -m rft_trainer.workers.main TASK MEMORY`. Nothing is
caught here: what raises is written down and ends the process, and the pool starts another one.
Torch is not imported unless the user's own file does so.

Lines in:  {"id": 7, "alarm": 12.0, "payload": {...}}
Lines out: {"ready": true}, {"refused": {...}} (the task cannot be loaded), {"id": 7, "result": ..., "last": false},
{"id": 7, "error": "ValueError: ...", "place": "reward.py:12"} (the last line of a process).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import BinaryIO

from rft_core.errors import RftError

Handler = Callable[[Mapping[str, object]], object]

TASK_MODULES = {
    "math": "rft_trainer.rewards.math_task",
    "file": "rft_trainer.workers.user_file",
    "environment": "rft_trainer.environments.worker_task",
}
"""Module of each kind of task; its `load(path, name)` returns the handler of requests."""

_GROWTH_SHARE = 4  # an answer that takes a fourth of the memory limit for itself is not trusted
_current_id: int | None = None


def main(task: str, memory_bytes: int) -> None:
    """Load the task, report that it is ready, then answer requests until the pipe ends."""
    requests, replies = _claim_pipes()
    sys.excepthook = _last_words(replies)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    handler = _load_task(task, replies)
    _send(replies, {"ready": True})
    for line in requests:
        _answer(json.loads(line), handler, replies, memory_bytes)


def _answer(request: Mapping[str, object], handler: Handler, replies: int, memory_bytes: int) -> None:
    global _current_id
    request_id, alarm, payload = request["id"], request["alarm"], request["payload"]
    assert isinstance(request_id, int)
    assert isinstance(alarm, float)
    assert isinstance(payload, dict)
    _current_id = request_id
    # The pool kills this process at the deadline. The alarm ends it if the pool itself has died.
    signal.setitimer(signal.ITIMER_REAL, alarm)
    before = _peak_memory()
    result = handler(payload)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    peak = _peak_memory()
    if memory_bytes and peak - before > memory_bytes // _GROWTH_SHARE:
        # Libraries turn running out of memory into "not equal"; such an answer must not become a 0.
        raise MemoryError(f"scoring took {(peak - before) >> 20} MiB, the limit is {memory_bytes >> 20} MiB")
    # A fresh process takes over before what libraries remember fills the limit.
    is_last = bool(memory_bytes) and peak > memory_bytes // 2
    _send(replies, {"id": request_id, "result": result, "last": is_last})
    _current_id = None


def _load_task(task: str, replies: int) -> Handler:
    """Load the handler of `KIND`, or of `KIND:PATH:NAME` with a user's file; kinds are those of `TASK_MODULES`."""
    kind, _, location = task.partition(":")
    path, _, name = location.rpartition(":")
    # Imported by name and only when asked for: the module of "math" alone takes over a second, and a pool of workers
    # must not depend on the rooms that use it.
    module = importlib.import_module(TASK_MODULES[kind])
    try:
        return module.load(path, name)
    except RftError as error:
        _send(replies, {"refused": {"kind": type(error).__name__, **asdict(error.problem)}})
        sys.exit(0)


def _claim_pipes() -> tuple[BinaryIO, int]:
    """Return the pipes to the pool, out of reach of `print` and `input`, which get stderr and an empty input."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _last_words(replies: int) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        summary = traceback.format_exception_only(kind, error)[-1].strip()
        _send(replies, {"id": _current_id, "error": summary[:2000], "place": _place(error)})

    return hook


def _place(error: BaseException) -> str:
    """Return file:line where the error was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"


def _send(replies: int, message: Mapping[str, object]) -> None:
    line = json.dumps(message, allow_nan=False).encode() + b"\n"
    while line:
        line = line[os.write(replies, line) :]


def _peak_memory() -> int:
    """Return the peak resident size in bytes; 0 where the system does not report it.

    `getrusage` is of no use: on Linux its maximum is inherited from the process that started this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        return 0
    return 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
