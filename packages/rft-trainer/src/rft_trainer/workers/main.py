"""Main program of a scoring process: reads one JSON line a request, writes one JSON line a reply.

Started by `pool.WorkerPool` as `python -P -m rft_trainer.workers.main TASK ADDRESS_BYTES DATA_BYTES READ_FD WRITE_FD`.
Nothing is caught here: what raises is written down and ends the process, and the pool starts another one.
Torch is not imported unless the user's own file does so.

Lines in:  {"id": 7, "alarm": 12.0, "payload": {...}}
Lines out: {"ready": true}, {"refused": {...}} (the task cannot be loaded), {"id": 7, "result": ..., "last": false},
{"id": 7, "error": "ValueError: ...", "place": "reward.py:12", "traceback": "..."} (the last line of a process;
"exit": true where the user's code asked for the end). The first line also has what the handler's `about` holds.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from types import TracebackType

from rft_core.child_process import ParentPipes, error_fields, kill_descendants
from rft_core.errors import RftError
from rft_trainer.workers.user_errors import error_line, error_place, print_traceback, user_traceback

Handler = Callable[[Mapping[str, object]], object]

TASK_MODULES = {
    "math": "rft_trainer.rewards.math_task",
    "rule": "rft_trainer.rewards.rules.pool_task",
    "file": "rft_trainer.workers.user_file",
    "installed": "rft_trainer.workers.installed_function",
    "module": "rft_trainer.workers.module_function",
    "environment": "rft_trainer.environments.worker_task",
}
"""Module of each kind of task; its `load(path, name)` returns the handler of requests."""

_GROWTH_SHARE = 4  # an answer that takes a fourth of the memory limit for itself is not trusted
_current_id: int | None = None


def main(task: str, memory_bytes: int, data_bytes: int, pipes: ParentPipes) -> None:
    """Load the task, report that it is ready, then answer requests until the pipe ends."""
    # before anything can fail, the load of the task included
    sys.excepthook = _last_words(pipes, _hint(task, data_bytes))
    # a killed or crashed process must not fill the disk with its memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    # under the memory limit, so that a task which does not fit fails here and not at its first job
    handler = _load_task(task, pipes)
    # what user code prints is in the log before the process ends, however that is
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _send(pipes, {"ready": True, **getattr(handler, "about", {})})
    for line in pipes.requests:
        _answer(json.loads(line), handler, pipes, memory_bytes)
    # the pipe has ended: with the parent's order to end, or with the parent, which then kills nothing
    kill_descendants()


def _answer(request: Mapping[str, object], handler: Handler, pipes: ParentPipes, memory_bytes: int) -> None:
    global _current_id
    request_id, alarm, payload = request["id"], request["alarm"], request["payload"]
    assert isinstance(request_id, int)
    assert isinstance(alarm, float)
    assert isinstance(payload, dict)
    _current_id = request_id
    # The pool kills this process at the deadline. The alarm ends it if the pool itself has died.
    signal.setitimer(signal.ITIMER_REAL, alarm)
    before = _peak_memory()
    try:
        result = handler(payload)
    except SystemExit as error:
        # Python would end without a word
        sys.excepthook(SystemExit, error, error.__traceback__)
        sys.stdout.flush()
        os._exit(1)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    peak = _peak_memory()
    if memory_bytes and peak - before > memory_bytes // _GROWTH_SHARE:
        # Libraries turn running out of memory into "not equal"; such an answer must not become a 0.
        raise MemoryError(f"scoring took {(peak - before) >> 20} MiB, the limit is {memory_bytes >> 20} MiB")
    # A fresh process takes over before what libraries remember fills the limit.
    is_last = bool(memory_bytes) and peak > memory_bytes // 2
    _send(pipes, {"id": request_id, "result": result, "last": is_last})
    _current_id = None


def _load_task(task: str, pipes: ParentPipes) -> Handler:
    """Load the handler of `KIND`, `KIND:NAME` or `KIND:PATH:NAME`, where PATH is a file or a module.

    Kinds are those of `TASK_MODULES`.
    """
    kind, _, location = task.partition(":")
    path, _, name = location.rpartition(":")
    # Imported by name and only when asked for: the module of "math" alone takes over a second, and a pool of workers
    # must not depend on the rooms that use it.
    module = importlib.import_module(TASK_MODULES[kind])
    try:
        return module.load(path, name)
    except RftError as error:
        _send(pipes, {"refused": error_fields(error)})
        sys.exit(0)


def _hint(task: str, data_bytes: int) -> str:
    """Return what is told of memory that ran out."""
    kind = "environment" if task.startswith("environment:") else "reward"
    return f" (this process may take {data_bytes / 2**30:.3g} GiB: --{kind}_memory)" if data_bytes else ""


def _last_words(
    pipes: ParentPipes, hint: str
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # the parent logs this output, and shows its end where no answer arrives
        print_traceback(error.with_traceback(trace))
        summary = error_line(error)
        # torch and numpy have words of their own for it
        ran_out = isinstance(error, MemoryError) or "allocate memory" in summary
        words = {"error": summary + hint * ran_out, "place": error_place(error), "traceback": user_traceback(error)}
        _send(pipes, {"id": _current_id, **words, **({"exit": True} if kind is SystemExit else {})})

    return hook


def _send(pipes: ParentPipes, message: Mapping[str, object]) -> None:
    pipes.send(json.dumps(message, allow_nan=False).encode())


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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), ParentPipes(int(sys.argv[4]), int(sys.argv[5])))
