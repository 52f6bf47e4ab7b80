"""Processes that hold GPU memory, as `nvidia-smi` lists them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_GPU_FIELDS = "index,uuid,memory.total,memory.free"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_gpu_memory"
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """One process on one GPU."""

    pid: int
    name: str
    used_mib: int
    uuid: str = ""
    """Of the GPU."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and the processes that are known to hold some of it."""

    index: int
    uuid: str
    total_mib: int
    free_mib: int
    processes: tuple[DeviceProcess, ...] = ()

    @property
    def hidden_mib(self) -> int:
        """Memory in use by no process that is visible from here (another container's, or the driver's own)."""
        return max(self.total_mib - self.free_mib - sum(process.used_mib for process in self.processes), 0)


Inventory: TypeAlias = Callable[[], Sequence[Device]]
"""The GPUs of this machine; empty where there is none or `nvidia-smi` is absent."""


def nvidia_inventory() -> list[Device]:
    """The GPUs that `nvidia-smi` lists, in its order."""
    gpus = _asked(f"--query-gpu={_GPU_FIELDS}")
    return parse_inventory(gpus, _asked(f"--query-compute-apps={_PROCESS_FIELDS}")) if gpus else []


def parse_inventory(gpus: str, processes: str) -> list[Device]:
    """GPUs and processes from the two tables of `nvidia-smi`, as CSV without header and units."""
    holders = [
        DeviceProcess(int(pid), name, _number(used), uuid)
        for uuid, pid, name, used in (_cells(line, 4) for line in processes.splitlines() if line.strip())
    ]
    return [
        Device(int(index), uuid, _number(total), _number(free), tuple(p for p in holders if p.uuid == uuid))
        for index, uuid, total, free in (_cells(line, 4) for line in gpus.splitlines() if line.strip())
    ]


def visible_device(
    devices: Sequence[Device], number: int, environment: Mapping[str, str] | None = None
) -> Device | None:
    """The GPU that this process calls `cuda:number`; None where that is unknown."""
    shown = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    names = [str(device.index) for device in devices] if shown is None else shown.split(",")
    name = names[number].strip() if number < len(names) else ""
    matching = [device for device in devices if name and (str(device.index) == name or device.uuid.startswith(name))]
    # the beginning of an id may fit several GPUs: no device is better than a wrong one
    return matching[0] if len(matching) == 1 else None


def other_processes(device: Device | None) -> list[DeviceProcess]:
    """Return the processes on a GPU that are not of this run, the largest first."""
    own = {os.getpid(), os.getppid()}
    others = [] if device is None else [process for process in device.processes if process.pid not in own]
    return sorted(others, key=lambda process: -process.used_mib)


def held_by(device: Device | None) -> str:
    """Return the processes that hold a GPU as text, the largest first; empty where none is known."""
    processes = () if device is None else sorted(device.processes, key=lambda process: -process.used_mib)
    return "; ".join(f"pid {process.pid} {process.name} {process.used_mib} MiB" for process in processes)


def _asked(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    # the answer only explains another error, which must not be hidden by one of nvidia-smi's
    except (OSError, subprocess.SubprocessError):
        return ""


def _cells(line: str, num: int) -> list[str]:
    """Cells of a line; a name with a comma in it is one cell, the last but one."""
    cells = [cell.strip() for cell in line.split(",")]
    return [*cells[: num - 2], ", ".join(cells[num - 2 : -1]), cells[-1]]


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # "[N/A]" where the driver does not tell
