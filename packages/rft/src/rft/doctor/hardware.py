"""Hardware of this machine for a report on a fault: read without torch, which may not be there or not answer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_SECONDS = 5.0
_QUERY = ("name", "memory.total", "memory.used", "driver_version")
_MEMORY = Path("/proc/meminfo")
_CPU = Path("/proc/cpuinfo")


def hardware() -> dict[str, object]:
    """Return processor, memory, GPUs with their driver, and the CUDA version that torch is built for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "processor": _first(_CPU, "model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "memory": _first(_MEMORY, "MemTotal"),
        "memory_available": _first(_MEMORY, "MemAvailable"),
        "gpus": _gpus(),
        "cuda": _cuda(),
    }


def _first(file: Path, name: str) -> str:
    """Return the value of the first line `name: value` of a file of the system; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [{"error": f"nvidia-smi: {error}"}]
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_QUERY, row, strict=False)) for row in rows]


def _cuda() -> str:
    # a torch that is not imported yet would take seconds
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    return "torch is not imported" if version is None else str(version.cuda or "torch is built for CPUs")
