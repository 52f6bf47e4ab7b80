"""A process that has torch and the command line imported, and forks one child for each run it is asked for.

A run then costs what it computes and no import, so hundreds of them can be killed. The server itself trains
nothing, keeps no thread and installs nothing; each child is as fresh as a new process.

Lines of JSON: {"argv", "logs", "environments", "preludes", "directory"} in, one child for each environment (the
ranks of a run); {"pids"} and then {"statuses"} out. {"model"} loads a model and forgets it, for what that imports.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

import torch

IMPORTED = (
    "torch",
    "numpy.ctypeslib",
    "rich._emoji_codes",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "rft_cli.main",
    "rft_cli.diagnostics.problems",
    "rft_cli.diagnostics.fault_injection",
    "rft.stages.rl",
    "rft.stages.sft",
    "rft_cli.commands.training",
    "rft_cli.pages.run_summary",
    "rft_cli.pages.terminal",
    "rft_cli.commands.resume",
    "rft_cli.commands.quickstart.command",
    "rft_cli.commands.eval",
    "rft_models.tiny_models.text",
    "rft_models.decode.fast_decoder",
    "rft_models.decode.hf_decoder",
    "support.preludes",
)


def serve() -> None:
    """Answer requests until the input ends."""
    for name in IMPORTED:
        importlib.import_module(name)

    torch.set_num_threads(1)
    _say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "model" in request:
            _load(request["model"])
            continue
        pids = [_fork(request, log, env) for log, env in zip(request["logs"], request["environments"], strict=True)]
        _say({"pids": pids})
        _say({"statuses": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]})


def _load(model: str) -> None:
    importlib.import_module("rft_cli.config.resolve").resolve("rl", ["--pretrain", model])
    importlib.import_module("rft_models.policy.load").load_policy(model)
    _say({"ready": True})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _fork(request: dict[str, Any], log: str, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        _child(request, log, environment)
    return pid


def _child(request: dict[str, Any], log: str, environment: dict[str, str]) -> NoReturn:
    """Run the command as `rft-train` would, in a session of its own, and leave with its exit code."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect(log)
        os.chdir(request["directory"])
        os.environ.update(environment)
        # After a fork torch makes its pool anew at the first use; two threads of autograd at once abort the process.
        torch.set_num_threads(torch.get_num_threads())
        sys.argv = ["rft-train", *request["argv"]]
        preludes = importlib.import_module("support.preludes")
        for name, arguments in request["preludes"]:
            getattr(preludes, name)(*arguments)
        code = importlib.import_module("rft_cli.main").main()
    except BaseException as error:  # noqa: BLE001 - as the interpreter does: show it, and end with 1
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    serve()
