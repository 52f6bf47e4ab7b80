"""The diagnostics file of a failed command: command, settings, machine, versions, traceback, stacks, logs. No secrets.

A command registers its run directory (`remember_run_directory`), so that the file can be
written there wherever the failure happens; the resolved settings and the last metrics are read from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rft.doctor.hardware import hardware
from rft_core.errors import Problem
from rft_core.secrets import scrub, scrub_command, scrub_text
from rft_engine.registry import ENGINES
from rft_trainer.runs.reader import last_rows, read_text

PACKAGES = (
    "rft-cli",
    "rft",
    "rft-core",
    "rft-algos",
    "rft-models",
    "rft-engine",
    "rft-dist",
    "rft-trainer",
    "torch",
    "transformers",
    "safetensors",
    "pydantic",
    "tokenizers",
    "pyarrow",
    "deepspeed",
    "peft",
    "flash-attn",
    "triton",
)
_ENVIRONMENT = (
    "RFT_",
    "NCCL_",
    "TORCH",
    "CUDA",
    "OMP_",
    "MASTER_",
    "SLURM_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NODE_RANK",
)
NUM_ROWS = 20
NUM_LINES, NUM_LOGS = 40, 8
"""Last lines of a log, and logs, that of this rank first: a run of a thousand ranks has as many."""


class _Context:
    run_directory: Path | None = None


def remember_run_directory(directory: Path | None) -> None:
    """Set the directory into which a bundle of this process is written."""
    _Context.run_directory = directory


def write(error: BaseException, argv: list[str], problem: Problem | None = None) -> Path | None:
    """Write the bundle into the run's directory, else into the temporary one; None if neither takes it."""
    text = json.dumps(contents(error, argv, problem), indent=2, ensure_ascii=False, default=str)
    # several ranks may fail in the same second, in the same directory
    name = f"bundle-{time.strftime('%Y%m%d-%H%M%S')}-rank{os.environ.get('RANK', '0')}-{os.getpid()}.json"
    for directory in (_Context.run_directory, Path(tempfile.gettempdir())):
        if directory is None or not directory.is_dir():
            continue
        try:
            path = directory / name
            path.write_text(text + "\n", encoding="utf-8")
        except OSError:
            continue
        return path
    return None


def has_run_directory() -> bool:
    """Return True when the failed command had a run directory."""
    return _Context.run_directory is not None and _Context.run_directory.is_dir()


def what_an_interrupt_leaves() -> str:
    """Return what a second interrupt left of a run, and how it goes on; "" where there is no run."""
    if not has_run_directory():
        return ""
    return f": the steps since the last save are lost; rft-train resume {shlex.quote(str(_Context.run_directory))}"


def contents(error: BaseException, argv: list[str], problem: Problem | None = None) -> dict[str, Any]:
    """Return the content of a bundle."""
    run = _Context.run_directory
    return {
        "problem": scrub(json.loads(problem.as_json(0))["problem"]) if problem else None,
        "command": ["rft-train", *scrub_command(argv)],
        "working_directory": str(Path.cwd()),
        "versions": {"python": sys.version, "platform": platform.platform()} | _versions(),
        "hardware": scrub(hardware()),
        "environment": scrub({k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)}),
        "settings": scrub_text(read_text(run / "config.yaml")).splitlines() if run else [],
        # a traceback quotes messages, which may hold a key
        "traceback": scrub_text("".join(traceback.format_exception(error))).splitlines(),
        "stacks": scrub(_stacks()),
        "logs": _logs(run) if run else {},
        "run_directory": str(run) if run else None,
        "last_metrics": scrub(last_rows(run / "metrics.jsonl", NUM_ROWS)) if run else [],
    }


def _stacks() -> dict[str, list[str]]:
    """Return the stacks of all threads, innermost line first; no lines of code, which may hold a key."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": [
            f"{each.f_code.co_filename}:{number} ({each.f_code.co_name})"
            for each, number in traceback.walk_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
    }


def _logs(run: Path) -> dict[str, list[str]]:
    """Return the last lines of the logs of ranks, by name."""
    own = f"rank_{os.environ.get('RANK', '0')}.log"
    files = sorted((run / "logs").glob("*rank_*.log"), key=lambda file: (file.name != own, file.name))
    return {file.name: scrub_text("\n".join(_tail(file))).splitlines() for file in files[:NUM_LOGS]}


def _tail(file: Path) -> list[str]:
    return read_text(file).splitlines()[-NUM_LINES:]


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    # of the engines some are packages of their own name
    for name in ENGINES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
